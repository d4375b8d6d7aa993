//! The project's chores, as `cargo xtask COMMAND`.

#![forbid(unsafe_code)]

mod demo;
mod ptx;
mod setup;
mod synth;
mod test;
mod tidy;
mod workspace;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(bin_name = "cargo xtask", about = "zinc's chores")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Fetch the kernel toolchain, the assembler, a small model and the test vocabularies.
    Setup,
    /// Print text from the models that are small enough to come along.
    Demo,
    /// Setup, then every test.
    Test(test::Args),
    /// Formatting, lints and the repository's own text rules.
    Tidy,
    /// Build the kernels to PTX and report what each takes of the GPU.
    Ptx(ptx::Args),
    /// Write a random-weight model with the exact layout of a supported architecture.
    Synth(synth::SynthArgs),
}

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Setup => setup::run(),
        Command::Demo => demo::run(),
        Command::Test(args) => test::run(&args),
        Command::Tidy => tidy::run(),
        Command::Ptx(args) => ptx::run(&args),
        Command::Synth(args) => synth::run(&args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
