//! Products in the form that the options, the weights' type and the number of rows ask for.

use gpu_kernels::kernels::matmul::Tile;
use gpu_kernels::kernels::matmul::wide::is_wide;

use super::tensor::Tensor;
use super::weights::Matrix;
use super::{Activations, GpuBackend};
use crate::backend::{GatedAct, Result};
use crate::gpu::device::Device;
use crate::gpu::ops::{self, FloatProduct, Matvec, Product, RouteGroups, Tiles};

/// Rows from which on those with the same float weights are multiplied together.
const FLOAT_MIN_ROWS: u32 = 5;
/// Rows from which on routes are grouped by expert. Few rows hardly share experts: eight rows of eight, out of 256,
/// go to 57 different ones on average.
const GROUP_MIN_ROWS: u32 = 9;

impl<D: Device> GpuBackend<D> {
    /// The product of `n` rows of `x`, in the form that the options, the weights' type and the number of rows ask for.
    pub(super) fn product(
        &mut self,
        op: Matvec<'_>,
        x: &Tensor<D>,
        n_x_rows: u32,
        groups: Option<RouteGroups<'_>>,
    ) -> Result {
        let op = Matvec { dependent: self.dependent(), ..op };
        let quantised = self.options.activations == Activations::Int8 && ops::takes_q8(op.w.ty());
        let launched = if let Some(tiles) = self.wide_tiles(&op, groups).filter(|_| quantised) {
            let x = self.rounded(x, n_x_rows)?;
            ops::matmul_wide(&*self.device, &op, x, tiles)
        } else if quantised {
            let x = self.quantised(x, n_x_rows)?;
            let dense = || ops::dense_tile(self.device.properties(), op.w.rows(), op.tokens).map(Tiles::Dense);
            let tiles = if op.experts.is_some() { groups.map(Tiles::Experts) } else { dense() };
            match tiles {
                Some(tiles) => ops::matmul_q8(&*self.device, &op, x, tiles),
                None => ops::matvec_q8(&*self.device, &op, x),
            }
        } else {
            let (cols, x) = (x.cols(), x.rows(n_x_rows)?);
            if op.experts.is_none() && !ops::takes_q8(op.w.ty()) && op.tokens >= FLOAT_MIN_ROWS {
                let fast = self.options.activations == Activations::Int8 && !ops::takes_beside(op.tokens);
                let form = if fast { FloatProduct::Split } else { FloatProduct::Exact };
                ops::matmul_float(&*self.device, &op, None, x, cols, form)
            } else {
                ops::matvec(&*self.device, &op, x, cols)
            }
        };
        self.done(launched)
    }

    /// The tiles of a product by warpgroups: those that the routes were grouped for, or those of a dense product in a
    /// step of many rows.
    fn wide_tiles<'t>(&self, op: &Matvec<'_>, groups: Option<RouteGroups<'t>>) -> Option<Tiles<'t>> {
        if op.experts.is_some() {
            return groups.filter(|groups| is_wide(groups.tile)).map(Tiles::Experts);
        }
        let many = op.tokens >= self.options.wide_rows;
        let tile = || ops::wide_dense_tile(self.device.properties(), op.w.rows(), op.tokens);
        many.then(tile).flatten().map(Tiles::Dense)
    }

    /// What routes of a step of `n` rows are grouped for; nothing for few rows.
    pub(super) fn route_tile(&self, n: u32, n_routes: u32, n_expert: u32) -> Option<Tile> {
        let int8 = self.options.activations == Activations::Int8;
        let wide = || ops::wide_expert_tile(self.device.properties(), n_routes, n_expert);
        let wide = (int8 && n >= self.options.wide_rows).then(wide).flatten();
        wide.or_else(|| (int8 && n >= GROUP_MIN_ROWS).then(|| ops::expert_tile(n_routes, n_expert)))
    }

    /// `out = w·x`, or `out += w·x`, for `n` rows.
    pub(super) fn dense(
        &mut self,
        out: &mut Tensor<D>,
        w: &Matrix<D>,
        x: &Tensor<D>,
        n: u32,
        accumulate: bool,
    ) -> Result {
        let y_stride = out.cols();
        let y = out.rows_mut(n)?;
        self.product(Matvec { y_stride, accumulate, ..Matvec::new(w.view()?, y, n) }, x, n, None)
    }

    /// Whether [`float_pair`](Self::float_pair) takes these matrices.
    pub(super) fn pairs_floats(&self, a: &Matrix<D>, b: &Matrix<D>, n: u32) -> Result<bool> {
        let (a, b) = (a.view()?.ty(), b.view()?.ty());
        Ok(self.options.fuse && !ops::takes_q8(a) && a == b && n >= FLOAT_MIN_ROWS && ops::takes_beside(n))
    }

    /// `out = w·x` for two float matrices in one launch, for `n` rows.
    pub(super) fn float_pair(
        &mut self,
        [(out, w), (beside, beside_w)]: [(&mut Tensor<D>, &Matrix<D>); 2],
        x: &Tensor<D>,
        n: u32,
    ) -> Result {
        let (y_stride, beside_stride) = (out.cols(), beside.cols());
        let op = Matvec { y_stride, dependent: self.dependent(), ..Matvec::new(w.view()?, out.rows_mut(n)?, n) };
        let beside = Product { w: beside_w.view()?, y: beside.rows_mut(n)?, y_stride: beside_stride };
        let launched = ops::matmul_float(&*self.device, &op, Some(beside), x.rows(n)?, x.cols(), FloatProduct::Exact);
        self.done(launched)
    }

    pub(super) fn gated(
        &mut self,
        out: &mut Tensor<D>,
        gate: &Tensor<D>,
        up: &Tensor<D>,
        act: GatedAct,
        n: u32,
    ) -> Result {
        let (gate, up) = (gate.rows(n)?, up.rows(n)?);
        let launched = match self.fused(out, n)? {
            Some((out, q8)) => ops::gated_act_q8(&*self.device, Some(act), gate, up, out, q8),
            None => ops::gated_act(&*self.device, act, gate, up, out.rows_mut(n)?),
        };
        self.done(launched)
    }
}
