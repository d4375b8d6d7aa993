//! `host chat`: a conversation.

use std::io::{self, BufRead, IsTerminal};

use clap::Args as ClapArgs;
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;

use super::args::{ModelArgs, SamplingArgs, token_limit};
use super::error::CliError;
use super::generate::generate;
use super::interrupt::Interrupt;
use super::prompt::chat_prompt;
use super::report::Report;
use super::{load, output};
use crate::chat::{Message, Role};
use crate::engine::{FinishReason, Request};

#[derive(Debug, ClapArgs)]
pub(super) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// The system message.
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    system: Option<String>,
    /// Most tokens of a reply; -1 runs to the end of the text or of the context.
    #[arg(short, default_value_t = -1, value_name = "N", allow_negative_numbers = true,
          value_parser = clap::value_parser!(i64).range(-1..=i64::from(u32::MAX)))]
    n: i64,
    #[command(flatten)]
    sampling: SamplingArgs,
}

const HELP: &str = "/clear forgets the conversation, /exit or Ctrl-D ends it; Ctrl-C stops a reply";

pub(super) fn chat(args: Args) -> Result<(), CliError> {
    let interrupt = Interrupt::listen();
    let load::Loaded { mut engine, load_s } = load::engine(&args.model)?;
    let system: Vec<_> = args.system.iter().map(|text| Message::new(Role::System, text.as_str())).collect();
    // Said now rather than after the first message: what is missing, and whether the template works.
    chat_prompt(&engine, &[system.as_slice(), &[Message::new(Role::User, "")]].concat())?;

    let mut lines = Lines::open()?;
    if lines.is_terminal() {
        eprintln!("{HELP}");
    }
    let mut messages = system.clone();
    while let Some(line) = lines.next()? {
        match line.trim() {
            "" => continue,
            "/exit" | "/quit" => break,
            "/help" => eprintln!("{HELP}"),
            "/clear" => messages.clone_from(&system),
            _ => {
                interrupt.reset();
                messages.push(Message::new(Role::User, line));
                let request = Request {
                    prompt: chat_prompt(&engine, &messages)?,
                    max_tokens: token_limit(args.n),
                    sampling: args.sampling.sampling(),
                    stop: args.sampling.stop.clone(),
                    ignore_eos: args.sampling.ignore_eos,
                    ..Request::default()
                };
                let reply = generate(&mut engine, request, &interrupt, output::write)?;
                output::write("\n")?;
                if lines.is_terminal() {
                    let report = Report::new(load_s, &reply.usage, &reply.timings).drafts(&engine.stats());
                    eprintln!("[{report}]");
                } else if reply.reason == FinishReason::Cancelled {
                    return Err(CliError::Interrupted);
                }
                messages.push(Message::new(Role::Assistant, reply.text));
            }
        }
    }
    Ok(())
}

/// Where the user's messages come from: an editor on a terminal, plain lines otherwise.
enum Lines {
    Editor(Box<DefaultEditor>),
    Plain,
}

impl Lines {
    fn open() -> Result<Self, CliError> {
        if !io::stdin().is_terminal() {
            return Ok(Self::Plain);
        }
        Ok(Self::Editor(Box::new(DefaultEditor::new().map_err(terminal_error)?)))
    }

    fn is_terminal(&self) -> bool {
        matches!(self, Self::Editor(_))
    }

    /// The next line; `None` at the end.
    fn next(&mut self) -> Result<Option<String>, CliError> {
        match self {
            Self::Editor(editor) => match editor.readline("> ") {
                Ok(line) => {
                    // A line that cannot be kept in the history is still a line.
                    editor.add_history_entry(&line).ok();
                    Ok(Some(line))
                }
                Err(ReadlineError::Eof | ReadlineError::Interrupted) => Ok(None),
                Err(e) => Err(terminal_error(e)),
            },
            Self::Plain => {
                let mut line = String::new();
                let read = io::stdin().lock().read_line(&mut line);
                let n = read.map_err(|source| CliError::Stream { stream: "stdin", source })?;
                Ok((n > 0).then(|| line.trim_end_matches(['\r', '\n']).to_owned()))
            }
        }
    }
}

fn terminal_error(e: ReadlineError) -> CliError {
    CliError::Stream { stream: "terminal", source: io::Error::other(e) }
}
