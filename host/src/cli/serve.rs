//! `host serve`: the HTTP server.

use std::net::IpAddr;
use std::time::Duration;

use axum::http::HeaderValue;
use clap::Args as ClapArgs;

use super::args::ModelArgs;
use super::error::CliError;
use super::load;
use super::model_path::default_model;
use crate::engine::EngineOptions;
use crate::server::{self, ServerOptions};

#[derive(Debug, ClapArgs)]
pub(super) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// The address to listen on.
    #[arg(long, default_value = "127.0.0.1", value_name = "HOST")]
    host: String,
    /// The port to listen on; 0 takes any free one.
    #[arg(long, default_value_t = 8080, value_name = "PORT")]
    port: u16,
    /// Requests that run at once.
    #[arg(long, default_value_t = 4, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    slots: u32,
    /// Requests that may wait for a slot; more are turned away (429).
    #[arg(long, default_value_t = 64, value_name = "N", value_parser = clap::value_parser!(u32).range(..=65_536))]
    queue: u32,
    /// Refuse requests that do not send this key; better given by the environment than in a process list.
    #[arg(long, value_name = "KEY", env = "ZINC_API_KEY", hide_env_values = true)]
    api_key: Option<String>,
    /// The name of the model in replies; without it, the file's.
    #[arg(long, value_name = "NAME")]
    alias: Option<String>,
    /// Seconds that replies under way may take to finish when the server is asked to end.
    #[arg(long, default_value_t = 30, value_name = "S", value_parser = clap::value_parser!(u64).range(..=86_400))]
    drain: u64,
    /// Seconds that a client may keep a connection waiting: for a request, or for taking something of a reply.
    #[arg(long, default_value_t = 30, value_name = "S", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    patience: u64,
    /// Let web pages of this origin use the API, such as https://example.org, or * for all; may be given several
    /// times.
    #[arg(long, value_name = "ORIGIN")]
    cors: Vec<HeaderValue>,
    /// Also answer to this name, where the server is for this machine alone and has no key (a proxy passes it on); may
    /// be given several times.
    #[arg(long, value_name = "NAME")]
    allow_host: Vec<String>,
}

pub(super) fn serve(args: Args) -> Result<(), CliError> {
    if args.api_key.as_ref().is_some_and(String::is_empty) {
        return Err(CliError::Usage("the API key is empty".to_owned()));
    }
    let path = default_model(args.model.model.as_deref())?;
    let file_name = || path.file_stem().map_or_else(|| "model".to_owned(), |stem| stem.to_string_lossy().into_owned());
    let alias = args.alias.unwrap_or_else(file_name);
    let options = EngineOptions { n_slots: args.slots, n_queue: args.queue as usize, ..args.model.options() };
    let load::Loaded { engine, load_s } = load::engine_with(&args.model, &options)?;
    tracing::info!("{alias} loaded in {load_s:.1} s");
    let open_to_all = args.api_key.is_none();
    let options = ServerOptions {
        host: args.host,
        port: args.port,
        api_key: args.api_key,
        alias,
        drain: Duration::from_secs(args.drain),
        patience: Duration::from_secs(args.patience),
        cors: args.cors,
        names: args.allow_host,
    };
    server::serve(engine, options, |address| {
        if open_to_all && !is_loopback(address.ip()) {
            tracing::warn!("anyone who reaches {address} can use this server: it has no --api-key");
        }
        eprintln!("listening on http://{address}");
    })?;
    Ok(())
}

fn is_loopback(ip: IpAddr) -> bool {
    ip.to_canonical().is_loopback()
}
