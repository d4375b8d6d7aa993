//! A loaded model with its memory: what runs batches.

use std::collections::VecDeque;

use super::config::{Config, LayerKind};
use super::draft::Drafter;
use super::executor::{Executor, Limits, MAX_IN_FLIGHT};
use super::layers::{Ffn, Mixer, Scratch};
use super::weights::{LoadError, Model, Nextn};
use crate::backend::{Backend, Batch, CacheShape, Choose, Error, LayerCache, Measured, PAGE_TOKENS, Result, Section};
use crate::gguf::Gguf;

/// A model, its cache and its activations on a backend.
pub struct Session<B: Backend> {
    backend: B,
    config: Config,
    limits: Limits,
    model: Model<B>,
    cache: B::Cache,
    scratch: Scratch<B>,
    drafter: Option<Drafter<B>>,
    /// Rows of the last batch.
    n_rows: usize,
    /// Outputs of the last step that chose.
    n_chosen: u32,
    /// Outputs of the steps that were submitted and not collected.
    in_flight: VecDeque<u32>,
}

impl<B: Backend> Session<B> {
    /// Loads a model and allocates all memory that it will use.
    ///
    /// # Errors
    /// If the file is no model that zinc runs, or the device has no room.
    pub fn new(backend: B, gguf: &Gguf, limits: Limits) -> Result<Session<B>, LoadError> {
        Self::load(backend, gguf, limits, false)
    }

    /// The same, with `draft` able to guess further tokens where the model can.
    ///
    /// # Errors
    /// As [`Session::new`].
    pub fn load(mut backend: B, gguf: &Gguf, limits: Limits, draft: bool) -> Result<Session<B>, LoadError> {
        let config = Config::from_gguf(gguf)?;
        let model = Model::load(&mut backend, gguf, &config)?;
        let nextn = if draft { Nextn::load(&mut backend, gguf, &config)? } else { None };
        let failed = |what: &str, source| LoadError::Backend { what: what.to_owned(), source };
        let mut shape = cache_shape(&config, limits);
        let layer = shape.layers.len() as u32;
        if nextn.is_some() {
            shape.layers.push(LayerCache::Kv { kv_dim: config.n_embd_kv() as u32 });
        }
        let cache = backend.cache(&shape).map_err(|e| failed("cache", e))?;
        let scratch = scratch(&mut backend, &config, limits).map_err(|e| failed("activations", e))?;
        let (sizes, rows) = ([config.n_embd, config.n_vocab], [limits.n_batch, limits.n_outputs]);
        let drafter = nextn.map(|nextn| Drafter::new(&mut backend, nextn, layer, sizes, rows)).transpose();
        let drafter = drafter.map_err(|e| failed("activations", e))?;
        Ok(Session {
            backend,
            config,
            limits,
            model,
            cache,
            scratch,
            drafter,
            n_rows: 0,
            n_chosen: 0,
            in_flight: VecDeque::new(),
        })
    }

    /// Checks a batch, and runs the layers and the head over it; with `choose`, chooses tokens.
    fn logits_step(&mut self, batch: &Batch, choose: Option<&Choose>) -> Result {
        check(batch, &self.config, self.limits)?;
        let (has_outputs, all_rows) = (!batch.outputs.is_empty(), batch.outputs.len() == batch.tokens.len());
        self.n_rows = batch.tokens.len();
        let batch = &match choose {
            None => self.backend.batch(batch)?,
            Some(choose) => self.backend.choosing_batch(batch, choose)?,
        };
        let n_tokens = choose.map(|choose| choose.n_tokens);
        let (model, s, cache) = (&mut self.model, &mut self.scratch, &mut self.cache);
        self.backend.run_recorded(batch, n_tokens.unwrap_or(0), move |b| {
            b.feed(batch)?;
            layers(b, model, s, cache, batch)?;
            if !has_outputs {
                return Ok(());
            }
            // Outputs are in order: as many as there are rows are all of them.
            let wanted = if all_rows {
                &s.norm
            } else {
                b.gather_outputs(&mut s.output, &s.norm, batch)?;
                &s.output
            };
            b.head(&mut s.logits, model.head(), wanted, batch)?;
            n_tokens.map_or(Ok(()), |n_tokens| b.choose(&s.logits, n_tokens, batch))
        })
    }

    /// Checks what a step chooses.
    fn check_choose(&self, batch: &Batch, choose: &Choose) -> Result {
        let (n_vocab, n_outputs, n_rows) = (self.config.n_vocab, batch.outputs.len(), batch.tokens.len());
        let Choose { n_tokens, draws, fed } = choose;
        if *n_tokens == 0 || *n_tokens as usize > n_vocab {
            return Err(Error::Batch(format!("a choice among {n_tokens} tokens of {n_vocab}")));
        }
        if !(draws.is_empty() || draws.len() == n_outputs) || !(fed.is_empty() || fed.len() == n_rows) {
            let (draws, fed) = (draws.len(), fed.len());
            return Err(Error::Batch(format!("{draws} draws of {n_outputs} outputs, {fed} fed of {n_rows} rows")));
        }
        match fed.iter().flatten().find(|from| **from >= self.n_chosen) {
            Some(from) => Err(Error::Batch(format!("output {from} of {} of the step before", self.n_chosen))),
            None => Ok(()),
        }
    }
}

/// `s.norm = norm(layers(embed(tokens)))`.
fn layers<B: Backend>(
    b: &mut B,
    model: &Model<B>,
    s: &mut Scratch<B>,
    cache: &mut B::Cache,
    batch: &B::Batch,
) -> Result {
    b.section(Section::Embedding);
    b.embed(&mut s.x, &model.token_embd, batch)?;
    for (il, layer) in (0..).zip(&model.layers) {
        match &layer.mixer {
            Mixer::Attention(w) => {
                b.section(Section::Attention);
                b.attention_layer(w, s, cache, il, batch)?;
            }
            Mixer::DeltaNet(w) => {
                b.section(Section::DeltaNet);
                b.delta_net_layer(w, s, cache, il, batch)?;
            }
        }
        match &layer.ffn {
            Ffn::Dense(w) => {
                b.section(Section::Ffn);
                b.dense_ffn_layer(w, s, batch)?;
            }
            Ffn::Moe(w) => {
                b.section(Section::Moe);
                b.moe_layer(w, s, batch)?;
            }
        }
    }
    b.section(Section::Head);
    b.rms_norm(&mut s.norm, &s.x, &model.output_norm, model.rms_eps, batch)
}

impl<B: Backend> Executor for Session<B> {
    fn config(&self) -> &Config {
        &self.config
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    fn forward(&mut self, batch: &Batch, logits: &mut Vec<f32>) -> Result {
        let n_outputs = batch.outputs.len() as u32;
        self.logits_step(batch, None)?;
        self.backend.read(&self.scratch.logits, n_outputs, logits)
    }

    fn chooses(&self) -> bool {
        B::CHOOSES
    }

    fn submit(&mut self, batch: &Batch, choose: &Choose) -> Result {
        self.check_choose(batch, choose)?;
        if self.in_flight.len() >= MAX_IN_FLIGHT {
            return Err(Error::Batch(format!("{} steps are submitted and not collected", self.in_flight.len())));
        }
        self.logits_step(batch, Some(choose))?;
        let n_outputs = batch.outputs.len() as u32;
        if n_outputs > 0 {
            self.backend.queue_chosen(n_outputs)?;
            self.n_chosen = n_outputs;
        }
        self.in_flight.push_back(n_outputs);
        Ok(())
    }

    fn collect(&mut self, ids: &mut Vec<u32>) -> Result {
        match self.in_flight.pop_front() {
            None => Err(Error::Batch("no step was submitted".to_owned())),
            // Nothing of it is waited for.
            Some(0) => {
                ids.clear();
                Ok(())
            }
            Some(_) => self.backend.read_chosen(ids),
        }
    }

    fn set_profiling(&mut self, on: bool) {
        self.backend.set_profiling(on);
    }

    fn take_profile(&mut self) -> Result<Option<Measured>> {
        self.backend.take_profile()
    }

    fn take_narrowest_choice(&mut self) -> Option<f32> {
        self.backend.take_narrowest_choice()
    }

    fn hidden(&mut self, batch: &Batch, out: &mut Vec<f32>) -> Result {
        check(batch, &self.config, self.limits)?;
        let on_device = self.backend.batch(batch)?;
        let (model, s, cache) = (&mut self.model, &mut self.scratch, &mut self.cache);
        self.backend.run(move |b| layers(b, model, s, cache, &on_device))?;
        self.backend.read(&self.scratch.norm, batch.tokens.len() as u32, out)
    }

    fn drafts(&self) -> bool {
        self.drafter.is_some()
    }

    fn draft(&mut self, batch: &Batch, n_tokens: u32, n: u32, ids: &mut Vec<u32>) -> Result {
        check(batch, &self.config, self.limits)?;
        self.check_choose(batch, &Choose { n_tokens, ..Choose::default() })?;
        if batch.tokens.len() != self.n_rows {
            return Err(Error::Batch(format!("{} rows after a batch of {}", batch.tokens.len(), self.n_rows)));
        }
        let Some(drafter) = &mut self.drafter else { return Err(Error::Unsupported("guessing tokens".to_owned())) };
        let (backend, s, cache) = (&mut self.backend, &mut self.scratch, &mut self.cache);
        *ids = drafter.draft(backend, s, cache, &mut self.model, batch, n_tokens, n)?;
        // Its hidden states are no longer the main network's.
        (self.n_rows, self.n_chosen) = (0, 0);
        Ok(())
    }

    fn copy_state(&mut self, from: u32, to: u32) -> Result {
        let n_slots = self.limits.n_slots;
        if from.max(to) >= n_slots {
            return Err(Error::Batch(format!("state slots {from} and {to} of {n_slots}")));
        }
        self.backend.copy_state(&mut self.cache, from, to)
    }
}

fn cache_shape(config: &Config, limits: Limits) -> CacheShape {
    let layer = |kind: &LayerKind| match (kind, &config.ssm) {
        (LayerKind::DeltaNet, Some(ssm)) => LayerCache::Recurrent {
            conv_dim: ssm.conv_dim() as u32,
            d_conv: ssm.d_conv as u32,
            state: (ssm.d_inner * ssm.d_state) as u32,
        },
        _ => LayerCache::Kv { kv_dim: config.n_embd_kv() as u32 },
    };
    CacheShape { layers: config.layers.iter().map(layer).collect(), n_pages: limits.n_pages, n_slots: limits.n_slots }
}

/// Allocates the activations; those of layers that the model does not have get no columns.
fn scratch<B: Backend>(b: &mut B, config: &Config, limits: Limits) -> Result<Scratch<B>> {
    let &Config { n_embd, n_vocab, n_head, head_dim, n_ff, .. } = config;
    let (q_dim, kv_dim) = (n_head * head_dim, config.n_embd_kv());
    let ssm = config.ssm.as_ref();
    let (conv_dim, d_inner, n_head_v) = ssm.map_or((0, 0, 0), |ssm| (ssm.conv_dim(), ssm.d_inner, ssm.dt_rank));
    let q_gate_dim = if ssm.is_some() { q_dim } else { 0 };
    let moe = config.moe.as_ref();
    let (n_expert, n_used) = moe.map_or((0, 0), |moe| (moe.n_expert, moe.n_expert_used));
    let (n_ff_exp, exp_embd) = moe.map_or((0, 0), |moe| (moe.n_ff_exp, n_embd));
    let (n_ff, shared_embd) =
        moe.map_or((n_ff, 0), |moe| (moe.n_ff_shexp, if moe.n_ff_shexp > 0 { n_embd } else { 0 }));
    let m = limits.n_batch;
    let routed = m.checked_mul(n_used as u32);
    let routed = routed.ok_or_else(|| Error::Unsupported(format!("a batch of {m} rows with {n_used} experts each")))?;
    let n_out = limits.n_outputs;
    let mut tensor = |rows: u32, cols: usize| b.tensor(rows, cols as u32);
    Ok(Scratch {
        x: tensor(m, n_embd)?,
        norm: tensor(m, n_embd)?,
        qg: tensor(m, 2 * q_gate_dim)?,
        q: tensor(m, q_dim)?,
        q_gate: tensor(m, q_gate_dim)?,
        k: tensor(m, kv_dim)?,
        v: tensor(m, kv_dim)?,
        attn: tensor(m, q_dim)?,
        qkv: tensor(m, conv_dim)?,
        conv: tensor(m, conv_dim)?,
        z: tensor(m, d_inner)?,
        alpha: tensor(m, n_head_v)?,
        beta: tensor(m, n_head_v)?,
        delta: tensor(m, d_inner)?,
        gate: tensor(m, n_ff)?,
        up: tensor(m, n_ff)?,
        act: tensor(m, n_ff)?,
        router: tensor(m, n_expert)?,
        expert_gate: tensor(routed, n_ff_exp)?,
        expert_up: tensor(routed, n_ff_exp)?,
        expert_act: tensor(routed, n_ff_exp)?,
        expert_out: tensor(routed, exp_embd)?,
        shared_gate: tensor(m, shared_embd.min(1))?,
        shared_out: tensor(m, shared_embd)?,
        output: tensor(n_out, n_embd)?,
        logits: tensor(n_out, n_vocab)?,
        routes: b.routes(m, n_used as u32)?,
    })
}

/// Checks that a batch is one that the operations may run without looking.
fn check(batch: &Batch, config: &Config, limits: Limits) -> Result {
    let fail = |problem: String| Err(Error::Batch(problem));
    let n_rows = batch.tokens.len();
    if n_rows == 0 || n_rows > limits.n_batch as usize {
        return fail(format!("{n_rows} rows; 1 to {} are allowed", limits.n_batch));
    }
    if let Some(token) = batch.tokens.iter().find(|token| **token as usize >= config.n_vocab) {
        return fail(format!("token {token} of a vocabulary of {}", config.n_vocab));
    }
    let in_spans: u64 = batch.spans.iter().map(|span| u64::from(span.rows)).sum();
    if in_spans != n_rows as u64 {
        return fail(format!("{in_spans} rows in spans, {n_rows} tokens"));
    }
    if batch.outputs.len() > limits.n_outputs as usize {
        return fail(format!("{} outputs; {} are allowed", batch.outputs.len(), limits.n_outputs));
    }
    if !batch.outputs.is_sorted_by(|a, b| a < b) || batch.outputs.last().is_some_and(|last| *last as usize >= n_rows) {
        return fail(format!("outputs {:?} are not ascending rows below {n_rows}", batch.outputs));
    }
    // What the spans write must be theirs alone: a slot each, and the pages from their first position on.
    let mut slots: Vec<u32> = Vec::with_capacity(batch.spans.len());
    let mut written: Vec<u32> = Vec::new();
    for span in &batch.spans {
        if span.rows == 0 || span.slot >= limits.n_slots {
            return fail(format!("a span of {} rows in slot {} of {}", span.rows, span.slot, limits.n_slots));
        }
        let Some(end) = span.start.checked_add(span.rows) else {
            return fail(format!("positions from {} on, {} rows", span.start, span.rows));
        };
        if (span.pages.len() as u64) < u64::from(end.div_ceil(PAGE_TOKENS)) {
            return fail(format!("{} pages for {end} positions", span.pages.len()));
        }
        if let Some(page) = span.pages.iter().find(|page| **page >= limits.n_pages) {
            return fail(format!("page {page} of {}", limits.n_pages));
        }
        slots.push(span.slot);
        written.extend(&span.pages[(span.start / PAGE_TOKENS) as usize..end.div_ceil(PAGE_TOKENS) as usize]);
    }
    for (what, mut ids) in [("slot", slots), ("page", written)] {
        ids.sort_unstable();
        if let Some(pair) = ids.windows(2).find(|pair| pair[0] == pair[1]) {
            return fail(format!("{what} {} is written twice", pair[0]));
        }
    }
    Ok(())
}
