//! The project's chores, as `cargo xtask COMMAND`.

#![forbid(unsafe_code)]

mod bench;
mod demo;
mod dist;
mod golden;
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
    /// Check every golden file on a device and print the worst error of each.
    Golden(golden::Args),
    /// Measure the speed of a model beside llama.cpp's, in one run.
    Bench(bench::Args),
    /// Formatting, lints and the repository's own text rules.
    Tidy,
    /// Build the kernels to PTX and report what each takes of the GPU.
    Ptx(ptx::Args),
    /// Write a random-weight model with the exact layout of a supported architecture.
    Synth(synth::SynthArgs),
    /// Pack binaries, PTX and small models for a machine with a GPU and without Rust.
    Dist(dist::Args),
}

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Setup => setup::run(),
        Command::Demo => demo::run(),
        Command::Test(args) => test::run(&args),
        Command::Golden(args) => golden::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Tidy => tidy::run(),
        Command::Ptx(args) => ptx::run(&args),
        Command::Synth(args) => synth::run(&args),
        Command::Dist(args) => dist::run(&args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
