//! drayman
fn main() {}
