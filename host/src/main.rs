//! The `host` program: see [`host::cli`].

use std::io::IsTerminal;
use std::process::ExitCode;

use clap::Parser;
use host::cli::Cli;
use tracing_subscriber::EnvFilter;

fn main() -> ExitCode {
    let cli = Cli::parse();
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(cli.log_filter()));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .without_time()
        .with_target(cli.is_detailed())
        .init();
    match cli.run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) if e.is_closed_pipe() => ExitCode::SUCCESS,
        Err(e) => {
            let code = e.exit_code();
            // One line, whatever the causes say.
            let chain = format!("{:#}", anyhow::Error::new(e));
            eprintln!("error: {}", chain.lines().collect::<Vec<_>>().join(" "));
            code
        }
    }
}
