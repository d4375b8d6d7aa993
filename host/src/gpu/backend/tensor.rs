//! Activations on the device.

use std::cell::{Cell, OnceCell};
use std::sync::Arc;

use cuda_std::U32x4;
use gpu_kernels::kernels::matmul::Tile;
use gpu_kernels::kernels::softmax_topk::MAX_EXPERTS;
use gpu_kernels::params::Q8_BLOCK;

use super::{Activations, GpuBackend, Result, device_error};
use crate::backend::Error;
use crate::gpu::device::Device;
use crate::gpu::memory::{Buffer, Slice};
use crate::gpu::ops::{self, Bf16, Q8, RouteGroups};

/// f32 activations `[rows, cols]`, and their int8 and bf16 forms where a product takes these.
pub struct Tensor<D: Device> {
    data: Arc<Buffer<D, f32>>,
    rows: u32,
    cols: u32,
    /// Allocated when a product first wants it.
    q8: OnceCell<Quantised<D>>,
    /// Rows whose int8 form is that of `data` as it is now; writing makes it 0.
    n_quantised: Cell<u32>,
    /// The same of the bf16 form.
    bf16: OnceCell<Arc<Buffer<D, u16>>>,
    n_bf16: Cell<u32>,
}

/// The int8 form of a tensor.
struct Quantised<D: Device> {
    qs: Arc<Buffer<D, i8>>,
    d: Arc<Buffer<D, f32>>,
    s: Arc<Buffer<D, f32>>,
}

impl<D: Device> Tensor<D> {
    pub(super) fn new(backend: &mut GpuBackend<D>, rows: u32, cols: u32) -> Result<Self> {
        let data = backend.keep_zeroed("activations", rows as usize * cols as usize)?;
        let (q8, bf16) = (OnceCell::new(), OnceCell::new());
        Ok(Tensor { data, rows, cols, q8, n_quantised: Cell::new(0), bf16, n_bf16: Cell::new(0) })
    }

    /// Columns.
    pub fn cols(&self) -> u32 {
        self.cols
    }

    /// Rows that it has room for.
    pub(super) fn capacity(&self) -> u32 {
        self.rows
    }

    /// The first `n` rows, to read.
    pub(super) fn rows(&self, n: u32) -> Result<Slice<'_, f32>> {
        if n > self.rows {
            return Err(Error::Batch(format!("{n} rows in activations for {}", self.rows)));
        }
        self.data.part(..n as usize * self.cols as usize).map_err(device_error)
    }

    /// The first `n` rows, to write.
    pub(super) fn rows_mut(&mut self, n: u32) -> Result<Slice<'_, f32>> {
        self.n_quantised.set(0);
        self.n_bf16.set(0);
        self.rows(n)
    }
}

impl<D: Device> Quantised<D> {
    fn view(&self, cols: u32) -> Q8<'_> {
        Q8 { qs: self.qs.slice(), d: self.d.slice(), s: self.s.slice(), cols }
    }
}

impl<D: Device> Tensor<D> {
    /// The first `n` rows and their int8 form, for a kernel that writes both.
    pub(super) fn both_mut(&mut self, n: u32) -> Result<Option<(Slice<'_, f32>, Q8<'_>)>> {
        let Some(q8) = self.q8.get() else { return Ok(None) };
        self.n_quantised.set(n);
        self.n_bf16.set(0);
        Ok(Some((self.rows(n)?, q8.view(self.cols))))
    }
}

impl<D: Device> GpuBackend<D> {
    /// The first `n` rows of `out` with their int8 form, where a product is known to want that.
    pub(super) fn fused<'t>(&self, out: &'t mut Tensor<D>, n: u32) -> Result<Option<(Slice<'t, f32>, Q8<'t>)>> {
        let wanted = self.options.fuse && self.options.activations == Activations::Int8;
        if wanted { out.both_mut(n) } else { Ok(None) }
    }

    /// Activations with these values, `[values.len() / cols, cols]`.
    ///
    /// # Errors
    /// Where they do not fit.
    pub fn tensor_from(&mut self, values: &[f32], cols: u32) -> Result<Tensor<D>> {
        let rows = u32::try_from(values.len() / cols.max(1) as usize);
        let mut tensor = Tensor::new(self, rows.map_err(|_| Error::Batch("too many rows".to_owned()))?, cols)?;
        let n_rows = tensor.rows;
        self.device.upload(tensor.rows_mut(n_rows)?, values).map_err(device_error)?;
        Ok(tensor)
    }

    /// The int8 form of the first `n` rows, for a kernel that writes that alone: the f32 form is then out of date.
    pub(super) fn quantised_mut<'t>(&mut self, out: &'t mut Tensor<D>, n: u32) -> Result<Q8<'t>> {
        let q8 = self.int8_form(out)?;
        out.n_quantised.set(n);
        out.n_bf16.set(0);
        Ok(q8)
    }

    /// The bf16 form of the first `n` rows, rounded where it is out of date.
    pub(super) fn rounded<'t>(&mut self, x: &'t Tensor<D>, n: u32) -> Result<Bf16<'t>> {
        if x.bf16.get().is_none() {
            let bf16 = self.keep("bf16 activations", x.rows as usize * x.cols as usize)?;
            // Nobody else can have set it meanwhile.
            let _ = x.bf16.set(bf16);
        }
        let bf16 = Bf16 { x: x.bf16.get().expect("set above").slice(), cols: x.cols };
        if x.n_bf16.get() < n {
            let launched = ops::to_bf16(&*self.device, x.rows(n)?, x.cols, bf16, n);
            self.done(launched)?;
            x.n_bf16.set(n);
        }
        Ok(bf16)
    }

    /// The int8 form of the first `n` rows, quantised where it is out of date.
    pub(super) fn quantised<'t>(&mut self, x: &'t Tensor<D>, n: u32) -> Result<Q8<'t>> {
        let q8 = self.int8_form(x)?;
        if x.n_quantised.get() < n {
            let launched = ops::quantize_q8(&*self.device, x.rows(n)?, x.cols, q8, n);
            self.done(launched)?;
            x.n_quantised.set(n);
        }
        Ok(q8)
    }

    /// The first `n` rows and their int8 form, for a kernel that writes both.
    pub(super) fn both_forms<'t>(&mut self, out: &'t mut Tensor<D>, n: u32) -> Result<(Slice<'t, f32>, Q8<'t>)> {
        self.int8_form(out)?;
        out.n_quantised.set(n);
        let out = &*out;
        Ok((out.rows(n)?, self.int8_form(out)?))
    }

    /// Where the int8 form lies.
    fn int8_form<'t>(&mut self, x: &'t Tensor<D>) -> Result<Q8<'t>> {
        if x.q8.get().is_none() {
            let len = x.rows as usize * x.cols as usize;
            let q8 = Quantised {
                qs: self.keep("int8 activations", len)?,
                d: self.keep("int8 activations", len / Q8_BLOCK as usize)?,
                s: self.keep("int8 activations", len / Q8_BLOCK as usize)?,
            };
            // Nobody else can have set it meanwhile.
            let _ = x.q8.set(q8);
        }
        Ok(x.q8.get().expect("set above").view(x.cols))
    }
}

/// The experts chosen for every row, `[rows, n_used]`, and their weights.
pub struct Routes<D: Device> {
    pub(super) ids: Arc<Buffer<D, u32>>,
    pub(super) weights: Arc<Buffer<D, f32>>,
    pub(super) n_used: u32,
    /// The routes by expert, for products in tiles.
    order: Arc<Buffer<D, u32>>,
    tiles: Arc<Buffer<D, U32x4>>,
    /// The most routes of a tile, if they are grouped.
    tile: Option<Tile>,
}

impl<D: Device> Routes<D> {
    pub(super) fn new(backend: &mut GpuBackend<D>, rows: u32, n_used: u32) -> Result<Self> {
        let too_many = || Error::Batch(format!("{rows} rows of {n_used} experts each"));
        let n_routes = rows.checked_mul(n_used).ok_or_else(too_many)?;
        let len = n_routes as usize;
        Ok(Routes {
            ids: backend.keep_zeroed("routes", len)?,
            weights: backend.keep_zeroed("routes", len)?,
            n_used,
            order: backend.keep("routes by expert", len)?,
            tiles: backend.keep("routes by expert", ops::max_tiles(n_routes, MAX_EXPERTS) as usize)?,
            tile: None,
        })
    }

    /// Notes what the routes are grouped for; whoever routes anew says so.
    pub(super) fn set_tile(&mut self, tile: Option<Tile>) {
        self.tile = tile;
    }

    /// The routes by expert, if they are grouped.
    pub(super) fn groups(&self, n_routes: u32, n_expert: u32) -> Result<Option<RouteGroups<'_>>> {
        self.tile.map(|tile| self.grouped(n_routes, n_expert, tile)).transpose()
    }

    /// The routes by expert in such tiles, for whoever groups them.
    pub(super) fn grouped(&self, n_routes: u32, n_expert: u32, tile: Tile) -> Result<RouteGroups<'_>> {
        let n_tiles = ops::max_tiles(n_routes, n_expert) as usize;
        let order = self.order.part(..n_routes as usize).map_err(device_error)?;
        Ok(RouteGroups { order, tiles: self.tiles.part(..n_tiles).map_err(device_error)?, tile })
    }

    /// Routes of `rows` rows.
    pub(super) fn n_routes(&self, rows: u32) -> Result<u32> {
        let too_many = || Error::Batch(format!("{rows} rows of {} experts each", self.n_used));
        let n = rows.checked_mul(self.n_used).ok_or_else(too_many)?;
        if n as usize > self.ids.len() { Err(too_many()) } else { Ok(n) }
    }

    pub(super) fn ids(&self, n_routes: u32) -> Result<Slice<'_, u32>> {
        self.ids.part(..n_routes as usize).map_err(device_error)
    }

    pub(super) fn weights(&self, n_routes: u32) -> Result<Slice<'_, f32>> {
        self.weights.part(..n_routes as usize).map_err(device_error)
    }
}

/// Room for attention's open softmaxes. It grows to the largest shape that was seen.
pub(super) struct Partials<D: Device> {
    pub(super) out: Arc<Buffer<D, f32>>,
    pub(super) max_sum: Arc<Buffer<D, f32>>,
}

impl<D: Device> GpuBackend<D> {
    /// Room for `heads` heads of `head_dim`, rows and splits counted in.
    pub(super) fn partials(&mut self, heads: usize, head_dim: u32) -> Result<Partials<D>> {
        let (out, max_sum) = (heads * head_dim as usize, 2 * heads);
        let fits = |p: &&Partials<D>| p.out.len() >= out && p.max_sum.len() >= max_sum;
        if let Some(partials) = self.partials.as_ref().filter(fits) {
            return Ok(Partials { out: partials.out.clone(), max_sum: partials.max_sum.clone() });
        }
        let (out, max_sum) = (self.keep("attention", out)?, self.keep("attention", max_sum)?);
        self.partials = Some(Partials { out: out.clone(), max_sum: max_sum.clone() });
        Ok(Partials { out, max_sum })
    }

    /// Room for `len` elements of a delta net's chunks.
    pub(super) fn chunks(&mut self, len: usize) -> Result<Arc<Buffer<D, f32>>> {
        if let Some(chunks) = self.chunks.as_ref().filter(|chunks| chunks.len() >= len) {
            return Ok(Arc::clone(chunks));
        }
        let chunks = self.keep("delta-net chunks", len)?;
        self.chunks = Some(Arc::clone(&chunks));
        Ok(chunks)
    }
}
