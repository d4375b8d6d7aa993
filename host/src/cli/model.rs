//! `host model`: fetch models by name, and see which are here.

use std::io::Write;

use clap::{Args as ClapArgs, Subcommand};

use super::error::CliError;
use crate::models::{CATALOGUE, Store};

#[derive(Debug, ClapArgs)]
pub(super) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// The catalogue, and what of it is here.
    List,
    /// Fetch a model: a name of the catalogue, or hf:OWNER/REPO/FILE.gguf. What was interrupted goes on.
    Pull(Name),
    /// Print where a model's file is.
    Path(Name),
    /// Remove a model's files.
    Rm(Name),
}

#[derive(Debug, ClapArgs)]
struct Name {
    /// A name of the catalogue, or hf:OWNER/REPO/FILE.gguf.
    name: String,
}

pub(super) fn model(args: Args) -> Result<(), CliError> {
    let store = Store::of_user()?;
    match args.command {
        Command::List => list(&store),
        Command::Pull(Name { name }) => print(&store.pull(&name)?.display().to_string()),
        Command::Path(Name { name }) => print(&store.path(&name)?.display().to_string()),
        Command::Rm(Name { name }) => {
            let bytes = store.remove(&name)?;
            print(&format!("{name} removed: {:.1} MB", bytes as f64 / 1e6))
        }
    }
}

fn list(store: &Store) -> Result<(), CliError> {
    for entry in CATALOGUE {
        let here = store.bytes(entry.name);
        let size = here.map_or_else(|| "-".to_owned(), |bytes| format!("{:.1} MB", bytes as f64 / 1e6));
        print(&format!("{:<18} {size:>12}  {}", entry.name, entry.about))?;
    }
    Ok(())
}

fn print(line: &str) -> Result<(), CliError> {
    writeln!(std::io::stdout(), "{line}").map_err(|source| CliError::Stream { stream: "stdout", source })
}
