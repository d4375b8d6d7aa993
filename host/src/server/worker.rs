//! The engine's thread: it alone owns the [`Engine`], takes requests from a channel and steps while there is work.
//!
//! A client that goes away drops the receiving end of its events; the thread looks for that before every step, so
//! queued, prefilling and decoding requests alike give up their slot within one.

use std::collections::HashMap;
use std::sync::{Arc, Weak, mpsc};
use std::thread::{self, JoinHandle};

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;

use super::error::ServerError;
use super::metrics::Metrics;
use crate::engine::{Engine, Event, Request, RequestId, SubmitError};

/// What the engine can do for a client.
pub(super) enum Work {
    /// Complete a prompt.
    Reply(Box<Request>),
    /// The mean hidden state of a prompt.
    Embedding(Vec<u32>),
}

/// Why work was not taken.
#[derive(Debug)]
pub(super) enum Refused {
    /// The engine said no to the part at `index`.
    Submit { index: usize, error: SubmitError },
    /// There is no engine any more.
    Stopped,
}

/// The parts of one HTTP request: taken all together or not at all, reported on one channel.
struct Command {
    work: Vec<Work>,
    events: UnboundedSender<(usize, Event)>,
    taken: oneshot::Sender<Result<(), Refused>>,
}

/// The way to the engine. The thread ends when the last clone is gone.
#[derive(Clone)]
pub(super) struct Worker {
    commands: mpsc::Sender<Command>,
    /// Held by the thread for as long as it runs.
    alive: Weak<()>,
}

/// The events of one HTTP request, each with the index of its part. To drop it is to cancel.
///
/// Not bounded: a reply is no longer than the context, and a client that reads slowly must not stall the others.
pub(super) type Events = UnboundedReceiver<(usize, Event)>;

impl Worker {
    /// Starts the thread.
    pub(super) fn start(engine: Engine, metrics: Arc<Metrics>) -> Result<(Self, JoinHandle<()>), ServerError> {
        // Not bounded either: each command belongs to an open connection, and their number is.
        let (commands, inbox) = mpsc::channel();
        let token = Arc::new(());
        let alive = Arc::downgrade(&token);
        let run = move || {
            let _token = token;
            Loop { engine, metrics, live: HashMap::new() }.run(&inbox);
        };
        let thread = thread::Builder::new().name("engine".to_owned()).spawn(run).map_err(ServerError::Start)?;
        Ok((Self { commands, alive }, thread))
    }

    /// Whether there is an engine to take work.
    pub(super) fn is_running(&self) -> bool {
        self.alive.strong_count() > 0
    }

    /// Hands work to the engine. The answer comes before the next step.
    pub(super) async fn submit(&self, work: Vec<Work>) -> Result<Events, Refused> {
        let (events, receiver) = unbounded_channel();
        let (taken, answer) = oneshot::channel();
        self.commands.send(Command { work, events, taken }).map_err(|_| Refused::Stopped)?;
        answer.await.map_err(|_| Refused::Stopped)??;
        Ok(receiver)
    }
}

struct Client {
    index: usize,
    events: UnboundedSender<(usize, Event)>,
}

struct Loop {
    engine: Engine,
    metrics: Arc<Metrics>,
    live: HashMap<RequestId, Client>,
}

impl Loop {
    fn run(mut self, inbox: &mpsc::Receiver<Command>) {
        loop {
            if self.engine.is_idle() {
                match inbox.recv() {
                    Ok(command) => self.take(command),
                    // Every handle is gone, and nobody waits for anything.
                    Err(mpsc::RecvError) => return,
                }
            }
            while let Ok(command) = inbox.try_recv() {
                self.take(command);
            }
            self.cancel_abandoned();
            let events = self.engine.step();
            // First: who has a reply finds it counted.
            self.metrics.set_engine(self.engine.stats());
            events.into_iter().for_each(|event| self.report(event));
        }
    }

    fn take(&mut self, command: Command) {
        let Command { work, events, taken } = command;
        let mut ids = Vec::with_capacity(work.len());
        for (index, part) in work.into_iter().enumerate() {
            let id = match part {
                Work::Reply(request) => self.engine.submit(*request),
                Work::Embedding(prompt) => self.engine.submit_embedding(prompt),
            };
            match id {
                Ok(id) => ids.push(id),
                Err(error) => {
                    ids.into_iter().for_each(|id| self.engine.cancel(id));
                    // A client that is gone needs no answer.
                    taken.send(Err(Refused::Submit { index, error })).ok();
                    return;
                }
            }
        }
        for (index, id) in ids.into_iter().enumerate() {
            self.live.insert(id, Client { index, events: events.clone() });
        }
        // A client that is gone by now is found before the next step.
        taken.send(Ok(())).ok();
    }

    fn cancel_abandoned(&mut self) {
        let Self { engine, live, .. } = self;
        live.retain(|id, client| {
            let gone = client.events.is_closed();
            if gone {
                engine.cancel(*id);
            }
            !gone
        });
    }

    fn report(&mut self, event: Event) {
        let id = event.id();
        let finished = matches!(event, Event::Finished { .. });
        if let Event::Finished { timings, usage, .. } = &event {
            self.metrics.observe(timings, usage);
        }
        if let Some(client) = self.live.get(&id) {
            client.events.send((client.index, event)).ok();
        }
        if finished {
            self.live.remove(&id);
        }
    }
}
