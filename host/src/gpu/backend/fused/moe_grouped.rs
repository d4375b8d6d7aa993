//! Mixtures of experts for batches of decoding: some tokens, of which few meet at an expert.

use gpu_kernels::kernels::grouped::TILE_SIZE;

use crate::backend::Result;
use crate::gpu::backend::{Activations, Batch, GpuBackend};
use crate::gpu::device::Device;
use crate::gpu::ops::{self, ExpertDownGrouped, GateUpGrouped, SharedDownGrouped, SharedGateUp, SharedOut};
use crate::model::layers::{Moe, Scratch};

/// Rows from which on routes are grouped by expert. Fewer hardly share experts, and one launch less chooses them.
const BY_EXPERT_MIN_ROWS: u32 = 6;

impl<D: Device> GpuBackend<D> {
    /// Whether [`moe_grouped`](Self::moe_grouped) is the way for `n` rows, and takes the layer's types and shapes.
    pub(super) fn groups_moe(&self, w: &Moe<Self>, s: &Scratch<Self>, n: u32) -> Result<bool> {
        let (options, n_expert, n_used) = (&self.options, s.router.cols(), s.routes.n_used);
        let few = n >= BY_EXPERT_MIN_ROWS
            && ops::few_routes(s.routes.n_routes(n)?, n_expert, options.routes_per_expert)
            && ops::takes_topk_groups(n, n_expert, n_used);
        if !options.fuse || options.activations != Activations::Int8 || !few {
            return Ok(false);
        }
        let (gate, up) = (w.gate.view()?, w.up.view()?);
        let Some(shared) = &w.shared else {
            return Ok(
                ops::takes_gate_up_grouped(&gate, &up, None) && ops::takes_expert_down(w.down.view()?.ty(), None)
            );
        };
        let shared_up = (&shared.gate.view()?, &shared.up.view()?);
        Ok(ops::takes_gate_up_grouped(&gate, &up, Some(shared_up))
            && ops::takes_expert_down(w.down.view()?.ty(), Some(shared.down.view()?.ty())))
    }

    /// [`layers::moe`](crate::model::layers::moe) with the experts' weights read once, and straight to registers: norm;
    /// router, and the shared expert's; choice and grouping; gate and up of all experts; everything down; the sum.
    pub(super) fn moe_grouped(&mut self, w: &Moe<Self>, s: &mut Scratch<Self>, batch: &Batch<D>) -> Result {
        let n = batch.shape.rows;
        let (norm, router) = (&mut s.norm, (&mut s.router, &w.router));
        match w.shared.as_ref().and_then(|shared| shared.router.as_ref()) {
            Some(scale) => {
                self.norm_products([router, (&mut s.shared_gate, scale)], norm, &s.x, &w.norm, w.eps, batch)?;
            }
            None => self.norm_products([router], norm, &s.x, &w.norm, w.eps, batch)?,
        }
        self.choose_and_group(w, s, n)?;
        self.grouped_gate_up(w, s, n)?;
        self.grouped_down(w, s, n)?;

        let n_routes = s.routes.n_routes(n)?;
        let shared = match &w.shared {
            Some(shared) => {
                let gate = match shared.router {
                    Some(_) => Some(s.shared_gate.rows(n)?),
                    None => None,
                };
                Some(SharedOut { y: s.shared_out.rows(n)?, gate })
            }
            None => None,
        };
        let (cols, weights, y) = (s.x.cols(), s.routes.weights(n_routes)?, s.expert_out.rows(n_routes)?);
        let x = s.x.rows_mut(n)?;
        let launched = ops::moe_weighted_acc(&*self.device, x, y, weights, shared, s.routes.n_used, cols);
        self.done(launched)
    }

    /// `s.routes` from the router's logits.
    fn choose_and_group(&mut self, w: &Moe<Self>, s: &mut Scratch<Self>, n: u32) -> Result {
        let (n_routes, n_expert, n_used) = (s.routes.n_routes(n)?, s.router.cols(), s.routes.n_used);
        // The operations one by one would read other tiles.
        s.routes.set_tile(None);
        let groups = s.routes.grouped(n_routes, n_expert, TILE_SIZE)?;
        let (ids, weights) = (s.routes.ids(n_routes)?, s.routes.weights(n_routes)?);
        let bias = w.router_bias.as_ref().map(|bias| bias.data.slice());
        let logits = s.router.rows(n)?;
        let launched = ops::topk_groups(&*self.device, logits, bias, ids, weights, n_expert, n_used, w.rule, groups);
        self.done(launched)
    }

    /// The experts' hidden activations, and the shared one's, in int8.
    fn grouped_gate_up(&mut self, w: &Moe<Self>, s: &mut Scratch<Self>, n: u32) -> Result {
        let n_routes = s.routes.n_routes(n)?;
        let groups = s.routes.grouped(n_routes, s.router.cols(), TILE_SIZE)?;
        let x = self.quantised(&s.norm, n)?;
        let h = self.quantised_mut(&mut s.expert_act, n_routes)?;
        let shared = match &w.shared {
            Some(shared) => {
                let h = self.quantised_mut(&mut s.act, n)?;
                Some(SharedGateUp { gate: shared.gate.view()?, up: shared.up.view()?, h })
            }
            None => None,
        };
        let op = GateUpGrouped {
            gate: w.gate.view()?,
            up: w.up.view()?,
            gate_bias: w.gate_bias.as_ref().map(|bias| bias.data.slice()),
            up_bias: w.up_bias.as_ref().map(|bias| bias.data.slice()),
            act: w.act,
            groups,
            n_used: s.routes.n_used,
            shared,
            dependent: self.dependent(),
            tokens: n,
        };
        let launched = ops::gate_up_grouped(&*self.device, &op, x, h);
        self.done(launched)
    }

    /// The experts' outputs, and the shared one's.
    fn grouped_down(&mut self, w: &Moe<Self>, s: &mut Scratch<Self>, n: u32) -> Result {
        let n_routes = s.routes.n_routes(n)?;
        let groups = s.routes.grouped(n_routes, s.router.cols(), TILE_SIZE)?;
        let h = self.quantised(&s.expert_act, n_routes)?;
        let shared = match &w.shared {
            Some(shared) => {
                let h = self.quantised(&s.act, n)?;
                Some(SharedDownGrouped { w: shared.down.view()?, h, y: s.shared_out.rows_mut(n)? })
            }
            None => None,
        };
        let op = ExpertDownGrouped {
            w: w.down.view()?,
            bias: w.down_bias.as_ref().map(|bias| bias.data.slice()),
            groups,
            n_used: s.routes.n_used,
            shared,
            dependent: self.dependent(),
            tokens: n,
        };
        let launched = ops::expert_down_grouped(&*self.device, &op, h, s.expert_out.rows_mut(n_routes)?);
        self.done(launched)
    }
}
