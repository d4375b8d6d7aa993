//! The `host` command line.
//!
//! Data goes to stdout, everything else to stderr. The exit code is 0 only on success: 1 is an error, 2 a wrong command
//! line, 130 an interrupt. A reader that closes stdout early ends the program quietly.

mod args;
mod bench;
mod bench_plot;
mod bench_profile;
mod bench_report;
mod chat;
pub mod check;
mod compare;
mod error;
mod generate;
pub mod inspect;
mod interrupt;
mod load;
mod logits;
mod model;
mod model_path;
mod output;
mod prompt;
mod report;
mod run;
mod serve;
mod tokenize;

use clap::{Parser, Subcommand};

pub use error::CliError;
pub use model_path::default_model;

/// Runs GGUF language models on NVIDIA GPUs and on the CPU.
#[derive(Debug, Parser)]
#[command(name = "host", version, about, arg_required_else_help = true)]
pub struct Cli {
    /// Say more on stderr: -v for what is done, -vv for details (or set RUST_LOG).
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    verbose: u8,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Complete a prompt.
    Run(run::Args),
    /// Talk to a model; it remembers the conversation until the program ends.
    Chat(chat::Args),
    /// Say whether this machine can run models on a GPU, and what is missing.
    Check(check::CheckArgs),
    /// Show what is in a GGUF file: metadata, tensors, memory needs.
    Inspect(inspect::InspectArgs),
    /// Print the token ids of a text as a JSON array.
    Tokenize(tokenize::Args),
    /// Write the logits of every position of a token sequence.
    Logits(logits::Args),
    /// Say how far the logits of one device are from those of another, or of a file.
    Compare(compare::Args),
    /// Serve the model over HTTP: OpenAI's API, and a page to chat on.
    Serve(serve::Args),
    /// Fetch models by name, and see which are here.
    Model(model::Args),
    /// Measure the speed of prompts and replies.
    Bench(bench::Args),
}

impl Cli {
    /// Runs the command.
    ///
    /// # Errors
    /// The command failed; its message is to be shown to the user.
    pub fn run(self) -> Result<(), CliError> {
        match self.command {
            Command::Run(args) => run::run(args),
            Command::Chat(args) => chat::chat(args),
            Command::Check(args) => match check::run(&args, &mut std::io::stdout()) {
                Ok(true) => Ok(()),
                Ok(false) => Err(CliError::NotReady),
                Err(source) => Err(CliError::Stream { stream: "stdout", source }),
            },
            Command::Inspect(args) => inspect::run(&args),
            Command::Tokenize(args) => tokenize::tokenize(args),
            Command::Logits(args) => logits::logits(args),
            Command::Compare(args) => compare::compare(args),
            Command::Serve(args) => serve::serve(args),
            Command::Model(args) => model::model(args),
            Command::Bench(args) => bench::bench(args),
        }
    }

    /// Whether log lines say which module they come from.
    pub fn is_detailed(&self) -> bool {
        self.verbose > 1
    }

    /// What is logged unless RUST_LOG says otherwise.
    pub fn log_filter(&self) -> &'static str {
        match self.verbose {
            0 => "warn",
            1 => "info",
            _ => "debug",
        }
    }
}
