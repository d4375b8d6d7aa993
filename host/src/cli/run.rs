//! `host run`: complete a prompt.

use std::io::IsTerminal;
use std::path::PathBuf;

use clap::Args as ClapArgs;
use serde::Serialize;

use super::args::{Format, ModelArgs, SamplingArgs, token_limit};
use super::error::CliError;
use super::generate::generate;
use super::interrupt::Interrupt;
use super::prompt::chat_prompt;
use super::report::Report;
use super::{load, output};
use crate::chat::{Message, Role};
use crate::engine::{Engine, Request};
use crate::tokenizer::Encode;

#[derive(Debug, ClapArgs)]
pub(super) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// The prompt; without -p, -f or --ids it is read from stdin.
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true)]
    prompt: Option<String>,
    /// Read the prompt from a file.
    #[arg(short, long, value_name = "FILE", conflicts_with = "prompt")]
    file: Option<PathBuf>,
    /// The prompt as token ids.
    #[arg(long, value_name = "ID,…", value_delimiter = ',', conflicts_with_all = ["prompt", "file", "chat"])]
    ids: Option<Vec<u32>>,
    /// Most tokens to generate; -1 runs to the end of the text or of the context.
    #[arg(short, default_value_t = 256, value_name = "N", allow_negative_numbers = true,
          value_parser = clap::value_parser!(i64).range(-1..=i64::from(u32::MAX)))]
    n: i64,
    /// Put the prompt into the model's chat template, as the user's message.
    #[arg(long)]
    chat: bool,
    /// The system message.
    #[arg(long, value_name = "TEXT", requires = "chat", allow_hyphen_values = true)]
    system: Option<String>,
    /// Print the text as it comes, or one JSON object at the end.
    #[arg(long, value_enum, default_value_t = Format::Text)]
    format: Format,
    #[command(flatten)]
    sampling: SamplingArgs,
}

/// The result as JSON.
#[derive(Serialize)]
struct Output<'a> {
    prompt_ids: &'a [u32],
    ids: Vec<u32>,
    text: &'a str,
    finish_reason: &'a str,
    timings: Report,
}

pub(super) fn run(args: Args) -> Result<(), CliError> {
    // Read first: nobody wants to wait for a model to hear that a file is missing.
    let text = match &args.ids {
        Some(_) => None,
        None => Some(read_prompt(&args)?),
    };
    let interrupt = Interrupt::listen();
    let load::Loaded { mut engine, load_s } = load::engine(&args.model)?;
    interrupt.check()?;
    let prompt = match (text, args.ids) {
        (Some(text), _) if args.chat => chat_prompt(&engine, &messages(args.system, text))?,
        (Some(text), _) => plain_prompt(&engine, &text)?,
        (None, ids) => ids.unwrap_or_default(),
    };
    let request = Request {
        prompt: prompt.clone(),
        max_tokens: token_limit(args.n),
        sampling: args.sampling.sampling(),
        stop: args.sampling.stop,
        ignore_eos: args.sampling.ignore_eos,
        ..Request::default()
    };
    let stream = args.format == Format::Text;
    let reply = generate(&mut engine, request, &interrupt, |text| if stream { output::write(text) } else { Ok(()) })?;
    let report = Report::new(load_s, &reply.usage, &reply.timings).drafts(&engine.stats());
    match args.format {
        Format::Text => output::write("\n")?,
        Format::Json => output::write_json(&Output {
            prompt_ids: &prompt,
            ids: reply.ids(),
            text: &reply.text,
            finish_reason: reply.finish_reason(),
            timings: report,
        })?,
    }
    if std::io::stderr().is_terminal() {
        eprintln!("[{report}]");
    }
    interrupt.check()
}

fn messages(system: Option<String>, user: String) -> Vec<Message> {
    let system = system.map(|text| Message::new(Role::System, text));
    system.into_iter().chain([Message::new(Role::User, user)]).collect()
}

fn plain_prompt(engine: &Engine, text: &str) -> Result<Vec<u32>, CliError> {
    Ok(load::need_tokenizer(engine)?.encode(text, Encode { bos: true, special: false }))
}

fn read_prompt(args: &Args) -> Result<String, CliError> {
    match (&args.prompt, &args.file) {
        (Some(text), _) => Ok(text.clone()),
        (None, Some(path)) => output::read_file(path),
        (None, None) if std::io::stdin().is_terminal() => {
            Err(CliError::Usage("no prompt: give one with -p, -f, --ids or on stdin".to_owned()))
        }
        (None, None) => output::read_stdin(),
    }
}
