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

use super::{Activations, Batch, GpuBackend, Matrix, Result, Tensor, Vector};
use crate::backend::Backend;
use crate::gpu::device::Device;
use crate::gpu::ops::{self, Norm, Product};

/// Steps of more rows are bound by their work rather than by their launches.
pub(super) const FEW_ROWS: u32 = 8;

impl<D: Device> GpuBackend<D> {
    /// Whether a step of `n` rows goes through fused kernels, which take int8 activations.
    pub(super) fn fuses(&self, n: u32) -> bool {
        self.options.fuse && self.options.activations == Activations::Int8 && (1..=FEW_ROWS).contains(&n)
    }

    /// `norm = norm(x)`, and `out = w·norm` for each pair of `out` and `w`, over the first `n` rows.
    ///
    /// Of one row, the norm and the products of the first quantised type, with those in F32, go in one launch.
    pub(super) fn norm_products<const N: usize>(
        &mut self,
        jobs: [Job<'_, D>; N],
        norm: &mut Tensor<D>,
        x: &Tensor<D>,
        w: &Vector<D>,
        eps: f32,
        batch: &Batch<D>,
    ) -> Result {
        let mut jobs = jobs.map(Some);
        let n = batch.shape.rows;
        let products = if n == 1 && self.fuses(n) && x.cols() >= self.options.norm_cols && ops::takes_norm(x.cols()) {
            next_products(&mut jobs, n)?
        } else {
            Vec::new()
        };
        if products.is_empty() {
            self.rms_norm(norm, x, w, eps, batch)?;
        } else {
            let (y, q8) = self.both_forms(norm, n)?;
            let norm = Norm { x: x.rows(n)?, w: w.data.slice(), eps, y, q8 };
            let launched = ops::norm_matvecs(&*self.device, &products, &norm, self.dependent());
            self.done(launched)?;
        }
        self.products(jobs, norm, n)
    }

    /// `out = w·x` for each pair of `out` and `w` that is there, over the first `n` rows of the same activations `x`.
    ///
    /// Of few rows, matrices of one quantised type go in one launch, and those in F32 with the first of them. Of some
    /// more, float matrices go in pairs.
    fn products<const N: usize>(&mut self, mut jobs: [Option<Job<'_, D>>; N], x: &Tensor<D>, n: u32) -> Result {
        while self.fuses(n) {
            let products = next_products(&mut jobs, n)?;
            if products.is_empty() {
                break;
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

/// A result, and the weights it is a product of.
type Job<'a, D> = (&'a mut Tensor<D>, &'a Matrix<D>);

/// Takes the jobs that the next launch can do together; none where no weights are quantised.
fn next_products<'a, D: Device>(jobs: &mut [Option<Job<'a, D>>], n: u32) -> Result<Vec<Product<'a>>> {
    let types: Result<Vec<_>> = jobs.iter().flatten().map(|(_, w)| Ok(w.view()?.ty())).collect();
    let mut products = Vec::with_capacity(MATVECS_MAX);
    let Some(ty) = types?.into_iter().find(|ty| ops::takes_q8(*ty)) else { return Ok(products) };
    for job in jobs {
        let Some((out, w)) = job.take_if(|(_, w)| {
            products.len() < MATVECS_MAX && w.view().is_ok_and(|w| ops::common_type([ty, w.ty()]).is_some())
        }) else {
            continue;
        };
        let y_stride = out.cols();
        products.push(Product { w: w.view()?, y: out.rows_mut(n)?, y_stride });
    }
    Ok(products)
}
