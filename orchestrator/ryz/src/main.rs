//! The `ryz` command.

use std::process::ExitCode;

fn main() -> ExitCode {
    ryz::command::run()
}
