//! `cargo xtask`: the project's own build and data tools.

#![forbid(unsafe_code)]

mod synth;

use clap::Parser;

#[derive(Debug, Parser)]
#[command(name = "xtask", about = "The project's own tools")]
enum Command {
    Synth(synth::SynthArgs),
}

fn main() -> anyhow::Result<()> {
    match Command::parse() {
        Command::Synth(args) => synth::run(&args),
    }
}
