//! The `ryz` command.

fn main() {}
