//! The program `drayman` once more, for `hack/image --profile dev`, which links it statically.

use std::process::ExitCode;

fn main() -> ExitCode {
    drayman::main(std::env::args_os())
}
