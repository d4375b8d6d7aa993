//! Mixtures of experts in few launches.

use crate::backend::Result;
use crate::gpu::backend::{Batch, GpuBackend};
use crate::gpu::device::Device;
use crate::gpu::ops::{self, ExpertDown, GateUp, Routing, SharedAct, SharedDown};
use crate::model::layers::{self, Moe, Scratch};

impl<D: Device> GpuBackend<D> {
    /// [`layers::moe`] in three launches, where there are kernels for the shapes and types: norm, router and shared
    /// expert's gate and up; the chosen experts' gate and up; everything down.
    pub(in crate::gpu::backend) fn moe_stages(
        &mut self,
        w: &Moe<Self>,
        s: &mut Scratch<Self>,
        batch: &Batch<D>,
    ) -> Result {
        let n = batch.shape.rows;
        if self.groups_moe(w, s, n)? {
            return self.moe_grouped(w, s, batch);
        }
        if !self.fuses(n) || !self.fuses_moe(w, s)? {
            return layers::moe(self, w, s, batch);
        }
        let (norm, router) = (&mut s.norm, (&mut s.router, &w.router));
        match &w.shared {
            None => self.norm_products([router], norm, &s.x, &w.norm, w.eps, batch)?,
            Some(shared) => {
                let (gate, up) = ((&mut s.gate, &shared.gate), (&mut s.up, &shared.up));
                match &shared.router {
                    Some(scale) => {
                        let jobs = [router, (&mut s.shared_gate, scale), gate, up];
                        self.norm_products(jobs, norm, &s.x, &w.norm, w.eps, batch)?;
                    }
                    None => self.norm_products([router, gate, up], norm, &s.x, &w.norm, w.eps, batch)?,
                }
            }
        }
        self.moe_gate_up(w, s, n)?;
        self.moe_down(w, s, n)
    }

    /// Whether the fused kernels take the layer's types and shapes.
    fn fuses_moe(&self, w: &Moe<Self>, s: &Scratch<Self>) -> Result<bool> {
        let shared = match &w.shared {
            Some(shared) => Some(shared.down.view()?.ty()),
            None => None,
        };
        let whole = w.shared.is_none() || s.act.cols().is_multiple_of(gpu_kernels::params::Q8_COLS);
        Ok(whole
            && ops::takes_gate_up(&w.gate.view()?, &w.up.view()?)
            && ops::takes_routing(s.router.cols(), s.routes.n_used)
            && ops::takes_expert_down(w.down.view()?.ty(), shared))
    }

    /// The chosen experts' hidden activations, and the shared one's, in int8.
    fn moe_gate_up(&mut self, w: &Moe<Self>, s: &mut Scratch<Self>, n: u32) -> Result {
        let n_routes = s.routes.n_routes(n)?;
        let x = self.quantised(&s.norm, n)?;
        let h = self.quantised_mut(&mut s.expert_act, n_routes)?;
        let shared = match &w.shared {
            Some(_) => {
                Some(SharedAct { gate: s.gate.rows(n)?, up: s.up.rows(n)?, h: self.quantised_mut(&mut s.act, n)? })
            }
            None => None,
        };
        let routing = Routing {
            logits: s.router.rows(n)?,
            bias: w.router_bias.as_ref().map(|bias| bias.data.slice()),
            rule: w.rule,
            ids: s.routes.ids(n_routes)?,
            weights: s.routes.weights(n_routes)?,
            n_used: s.routes.n_used,
            shared,
            next: Some(w.down.view()?),
        };
        let op = GateUp {
            gate: w.gate.view()?,
            up: w.up.view()?,
            gate_bias: w.gate_bias.as_ref().map(|bias| bias.data.slice()),
            up_bias: w.up_bias.as_ref().map(|bias| bias.data.slice()),
            act: w.act,
            routing: Some(routing),
            dependent: self.dependent(),
            tokens: n,
        };
        let launched = ops::gate_up(&*self.device, &op, x, h);
        self.done(launched)
    }

    /// All experts' output, weighed, onto the residual stream.
    fn moe_down(&mut self, w: &Moe<Self>, s: &mut Scratch<Self>, n: u32) -> Result {
        let n_routes = s.routes.n_routes(n)?;
        let h = self.quantised(&s.expert_act, n_routes)?;
        let shared = match &w.shared {
            Some(shared) => {
                let gate = match shared.router {
                    Some(_) => Some(s.shared_gate.rows(n)?),
                    None => None,
                };
                Some(SharedDown { w: shared.down.view()?, h: self.quantised(&s.act, n)?, gate })
            }
            None => None,
        };
        let op = ExpertDown {
            w: w.down.view()?,
            bias: w.down_bias.as_ref().map(|bias| bias.data.slice()),
            ids: s.routes.ids(n_routes)?,
            weights: s.routes.weights(n_routes)?,
            n_used: s.routes.n_used,
            shared,
            dependent: self.dependent(),
            tokens: n,
        };
        let launched = ops::expert_down(&*self.device, &op, h, s.x.rows_mut(n)?);
        self.done(launched)
    }
}
