//! drayman
