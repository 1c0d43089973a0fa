//! The examples stay as short as the documentation promises: a driver in one file.

use crate::page::repository;

#[test]
fn the_examples_are_below_the_number_of_lines_that_is_promised() {
    for (example, promised) in [("network_attached", 200), ("sensors", 150)] {
        let path = repository(format!("examples/{example}.rs"));
        let text = std::fs::read_to_string(&path).expect("an example");
        let lines = text.lines().count();
        assert!(lines > 50, "{example} is complete: {lines} lines");
        assert!(
            lines < promised,
            "{example}: {lines} lines, of at most {}",
            promised - 1
        );
    }
}
