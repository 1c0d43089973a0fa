//! The program `drayman`; everything is in the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    drayman::main(std::env::args_os())
}
