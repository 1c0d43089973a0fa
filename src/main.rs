//! The program `drayman`; everything is in [`drayman::cli`].

use std::process::ExitCode;

fn main() -> ExitCode {
    drayman::cli::main(std::env::args_os())
}
