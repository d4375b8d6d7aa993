//! Whole sub-layers in few launches, for steps of few rows, where a launch costs as much as its work.
//!
//! Each falls back to the plain operations in [`layers`](crate::model::layers) for shapes and types without a
//! fused kernel, and with [`BackendOptions::fuse`](super::BackendOptions::fuse) off; those are its reference.

mod attention;
mod delta_net;
mod dense_ffn;
mod moe;
mod moe_grouped;

use gpu_kernels::params::MATVECS_MAX;

use super::{Activations, GpuBackend, Matrix, Result, Tensor};
use crate::gpu::device::Device;
use crate::gpu::ops::{self, Product};

/// Steps of more rows are bound by their work rather than by their launches.
pub(super) const FEW_ROWS: u32 = 8;

impl<D: Device> GpuBackend<D> {
    /// Whether a step of `n` rows goes through fused kernels, which take int8 activations.
    pub(super) fn fuses(&self, n: u32) -> bool {
        self.options.fuse && self.options.activations == Activations::Int8 && (1..=FEW_ROWS).contains(&n)
    }

    /// `out = w·x` for each pair of `out` and `w`, over the first `n` rows of the same activations `x`.
    ///
    /// Of few rows, matrices of one quantised type go in one launch, and those in F32 with the first of them. Of some
    /// more, float matrices go in pairs.
    pub(super) fn products<const N: usize>(
        &mut self,
        jobs: [(&mut Tensor<D>, &Matrix<D>); N],
        x: &Tensor<D>,
        n: u32,
    ) -> Result {
        let mut jobs = jobs.map(Some);
        while self.fuses(n) {
            let types = |jobs: &[Option<(&mut Tensor<D>, &Matrix<D>)>]| -> Result<Vec<_>> {
                jobs.iter().flatten().map(|(_, w)| Ok(w.view()?.ty())).collect()
            };
            let Some(ty) = types(&jobs)?.into_iter().find(|ty| ops::takes_q8(*ty)) else { break };
            let mut products = Vec::with_capacity(MATVECS_MAX);
            for job in &mut jobs {
                let Some((out, w)) = job.take_if(|(_, w)| {
                    products.len() < MATVECS_MAX && w.view().is_ok_and(|w| ops::common_type([ty, w.ty()]).is_some())
                }) else {
                    continue;
                };
                let y_stride = out.cols();
                products.push(Product { w: w.view()?, y: out.rows_mut(n)?, y_stride });
            }
            let q8 = self.quantised(x, n)?;
            let launched = ops::matvecs(&*self.device, &products, x.rows(n)?, q8, n, self.dependent());
            self.done(launched)?;
        }
        let mut rest = jobs.into_iter().flatten().peekable();
        while let Some((out, w)) = rest.next() {
            let pairs =
                |(_, next): &(&mut Tensor<D>, &Matrix<D>)| self.pairs_floats(w, next, n).is_ok_and(|pairs| pairs);
            match rest.next_if(pairs) {
                Some(next) => self.float_pair([(out, w), next], x, n)?,
                None => self.dense(out, w, x, n, false)?,
            }
        }
        Ok(())
    }
}
