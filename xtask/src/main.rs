//! The project's chores, as `cargo xtask COMMAND`.

#![forbid(unsafe_code)]

mod ptx;
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
    /// Build the kernels to PTX and report what each takes of the GPU.
    Ptx(ptx::Args),
}

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Ptx(args) => ptx::run(&args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
