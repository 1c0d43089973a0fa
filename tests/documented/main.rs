//! What the pages tell people to type on a cluster, typed on one: blocks that are marked `sh cluster` and `sh chart`, and every
//! object of a block marked `yaml object` (`tests/documentation/blocks.rs` lists the marks).

#[path = "../chart/chart.rs"]
#[allow(dead_code, reason = "shared with the tests of the chart")]
mod chart;
#[path = "../harness/mod.rs"]
mod harness;
#[path = "../chart/image.rs"]
#[allow(dead_code, unused_imports, reason = "shared with the tests of the chart")]
mod image;
#[path = "../documentation/page.rs"]
mod page;
#[path = "../documentation/shell.rs"]
mod shell;
#[path = "../chart/stage.rs"]
#[allow(dead_code, reason = "shared with the tests of the chart")]
mod stage;

mod installed;
mod objects;
mod tour;
