//! Products of many tokens, dense and by expert, at the shapes of the reference model: in every tile that is no larger
//! than the tokens need, and without tiles where those are few. What [`dense_tile`](super::super::dense_tile) and
//! [`expert_tile`](super::super::expert_tile) choose rests on these.

use cuda_std::U32x4;
use gpu_kernels::blocks::GgmlType;
use gpu_kernels::kernels::matmul::wide::{WIDE_TILES, is_wide};
use gpu_kernels::kernels::matmul::{TILES, Tile};

use super::{Bench, N_EXPERT, N_USED, Result, fill_random};
use crate::gpu::device::{Device, Properties};
use crate::gpu::memory::Buffer;
use crate::gpu::ops::{
    Bf16, Experts, FloatProduct, Matrix, Matvec, Q8, RouteGroups, Tiles, expert_tile, matmul_float, matmul_q8,
    matmul_wide, matvec_q8, max_tiles, route_groups,
};

/// Quantised and rounded activations of their own: there are more than the others take.
struct X<D: Device> {
    qs: Buffer<D, i8>,
    d: Buffer<D, f32>,
    s: Buffer<D, f32>,
    bf16: Buffer<D, u16>,
    cols: u32,
}

impl<D: Device> X<D> {
    fn new(device: &D, rows: u32, cols: u32) -> Result<Self> {
        let n = rows as usize * cols as usize;
        let (d, s) = (device.alloc_zeroed(n / 16)?, device.alloc_zeroed(n / 16)?);
        let x = X { qs: device.alloc(n)?, d, s, bf16: device.alloc(n)?, cols };
        fill_random(device, x.qs.slice())?;
        fill_random(device, x.bf16.slice())?;
        Ok(x)
    }

    fn q8(&self) -> Q8<'_> {
        Q8 { qs: self.qs.slice(), d: self.d.slice(), s: self.s.slice(), cols: self.cols }
    }

    /// The product with them: in tiles, or without any.
    fn multiply(&self, device: &D, op: &Matvec<'_>, tiles: Option<Tiles<'_>>) -> Result<u64> {
        match tiles {
            Some(tiles) if is_wide(tiles.tile()) => {
                matmul_wide(device, op, Bf16 { x: self.bf16.slice(), cols: self.cols }, tiles)
            }
            Some(tiles) => matmul_q8(device, op, self.q8(), tiles),
            None => matvec_q8(device, op, self.q8()),
        }
    }
}

/// The tiles that are no larger than so many tokens need, and those of warpgroups where the device has them.
fn tiles_up_to(device: &Properties, tokens: u32) -> impl Iterator<Item = Tile> {
    let wide = WIDE_TILES.into_iter().take(if device.wgmma { 2 } else { 0 });
    TILES.into_iter().filter(move |tile| tile.tokens < 2 * tokens.next_multiple_of(8)).chain(wide)
}

/// The operation's name, and what is to be said of its form.
fn form(tile: Option<Tile>) -> (&'static str, String) {
    match tile {
        Some(tile) => (if is_wide(tile) { "matmul_wide" } else { "matmul_q8" }, format!(", tiles of {}", tile.tokens)),
        None => ("matvec_q8", String::new()),
    }
}

impl<D: Device> Bench<'_, D> {
    /// All of them: batches of decoding, then prefill.
    pub(super) fn products(&mut self) -> Result<()> {
        let small = self.is_small();
        let tokens: &[u32] = if small { &[9] } else { &[8, 32, 512, 2048] };
        for &tokens in tokens {
            let shapes = if small { [[40, 256]; 2] } else { [[8192, 2048], [2048, 4096]] };
            for [rows, cols] in shapes {
                for tile in tiles_up_to(self.device.properties(), tokens) {
                    self.dense_tiles(GgmlType::Q8_0, [rows, cols], tokens, Some(tile))?;
                }
                if tokens <= 32 {
                    self.dense_tiles(GgmlType::Q8_0, [rows, cols], tokens, None)?;
                }
            }
            let n_expert = if small { 4 } else { N_EXPERT };
            let shapes = if small { [[40, 256]; 2] } else { [[512, 2048], [2048, 512]] };
            self.grouping(n_expert, tokens)?;
            let whole = tokens <= 32;
            for tile in tiles_up_to(self.device.properties(), tokens).map(Some).chain(whole.then_some(None)) {
                self.expert_tiles(GgmlType::Q4K, n_expert, shapes[0], tokens, true, tile)?;
                self.expert_tiles(GgmlType::Q5K, n_expert, shapes[1], tokens, false, tile)?;
            }
            let [rows, cols] = if small { [8, 64] } else { [256, 2048] };
            self.float_tiles(rows, cols, tokens, FloatProduct::Exact)?;
            self.float_tiles(rows, cols, tokens, FloatProduct::Split)?;
        }
        Ok(())
    }

    /// A dense product. Its matrix may fit the cache, so a chain goes through as many as there are.
    fn dense_tiles(&mut self, ty: GgmlType, [rows, cols]: [u32; 2], tokens: u32, tile: Option<Tile>) -> Result<()> {
        let device = self.device;
        let Some(bytes) = Matrix::size_bytes(ty, 1, rows, cols).filter(|bytes| *bytes <= self.weights.len() as u64)
        else {
            return Ok(());
        };
        let (bytes, x) = (bytes as usize, X::new(device, tokens, cols)?);
        let y = device.alloc::<f32>(tokens as usize * rows as usize)?;
        let launches = (self.weights.len() / bytes).min(16);
        let mut moved = 0;
        let us = self.time_graph(&mut || {
            for i in 0..launches {
                let w = Matrix::new(self.weights.part(i * bytes..(i + 1) * bytes)?, ty, 1, rows, cols)?;
                let op = Matvec::new(w, y.slice(), tokens);
                moved = x.multiply(device, &op, tile.map(Tiles::Dense))?;
            }
            Ok(())
        })? / launches as f64;
        let (op, form) = form(tile);
        let shape = format!("{tokens} x {rows} x {cols}{form}");
        self.push_product(op, ty.name(), shape, moved, us, [tokens, rows, cols]);
        Ok(())
    }

    /// Routes of so many tokens, each to experts that differ.
    fn routes(&self, n_expert: u32, tokens: u32) -> Result<Buffer<D, u32>> {
        let mut state = 1u32;
        let mut ids = Vec::new();
        for _ in 0..tokens {
            let first = ids.len();
            while ids.len() - first < N_USED.min(n_expert) as usize {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                let id = (state >> 16) % n_expert;
                if !ids[first..].contains(&id) {
                    ids.push(id);
                }
            }
        }
        Ok(self.device.alloc_from(&ids)?)
    }

    fn grouping(&mut self, n_expert: u32, tokens: u32) -> Result<()> {
        let (ids, n_used) = (self.routes(n_expert, tokens)?, N_USED.min(n_expert));
        let routes = tokens * n_used;
        let order = self.device.alloc::<u32>(routes as usize)?;
        let tiles = self.device.alloc::<U32x4>(max_tiles(routes, n_expert) as usize)?;
        let tile = expert_tile(routes, n_expert);
        let experts = Experts { ids: ids.slice(), ids_stride: n_used, n_used, shared_x: true };
        let shape = format!("{tokens} x {n_used} of {n_expert}");
        self.chain("route_groups", &shape, |device| {
            let groups = RouteGroups { order: order.slice(), tiles: tiles.slice(), tile };
            route_groups(device, &experts, tokens, n_expert, groups)
        })
    }

    fn expert_tiles(
        &mut self,
        ty: GgmlType,
        n_expert: u32,
        [rows, cols]: [u32; 2],
        tokens: u32,
        shared_x: bool,
        tile: Option<Tile>,
    ) -> Result<()> {
        let device = self.device;
        let fits = |bytes: &u64| *bytes <= self.weights.len() as u64;
        if Matrix::size_bytes(ty, n_expert, rows, cols).filter(fits).is_none() {
            return Ok(());
        }
        let w = Matrix::new(self.weights.slice(), ty, n_expert, rows, cols)?;
        let (ids, n_used) = (self.routes(n_expert, tokens)?, N_USED.min(n_expert));
        let routes = tokens * n_used;
        let x = X::new(device, if shared_x { tokens } else { routes }, cols)?;
        let y = device.alloc::<f32>(routes as usize * rows as usize)?;
        let order = device.alloc::<u32>(routes as usize)?;
        let tiles = device.alloc::<U32x4>(max_tiles(routes, n_expert) as usize)?;
        let experts = Experts { ids: ids.slice(), ids_stride: n_used, n_used, shared_x };
        let groups = tile.map(|tile| RouteGroups { order: order.slice(), tiles: tiles.slice(), tile });
        if let Some(groups) = groups {
            route_groups(device, &experts, tokens, n_expert, groups)?;
        }
        let op = Matvec { experts: Some(experts), ..Matvec::new(w, y.slice(), tokens) };
        let mut moved = 0;
        let us = self.time_graph(&mut || {
            moved = x.multiply(device, &op, groups.map(Tiles::Experts))?;
            Ok(())
        })?;
        let (op, form) = form(tile);
        let shape = format!("{tokens} x {n_used} of {n_expert} x {rows} x {cols}{form}");
        self.push_product(op, ty.name(), shape, moved, us, [routes, rows, cols]);
        Ok(())
    }

    fn float_tiles(&mut self, rows: u32, cols: u32, tokens: u32, form: FloatProduct) -> Result<()> {
        let device = self.device;
        let w = Matrix::new(self.weights.slice(), GgmlType::F32, 1, rows, cols)?;
        let x = self.floats(tokens as usize * cols as usize)?;
        let y = device.alloc::<f32>(tokens as usize * rows as usize)?;
        let mut moved = 0;
        let us = self.time_graph(&mut || {
            moved = matmul_float(device, &Matvec::new(w, y.slice(), tokens), None, x.slice(), cols, form)?;
            Ok(())
        })?;
        self.push_product(
            "matmul_float",
            "F32",
            format!("{tokens} x {rows} x {cols}{}", if form == FloatProduct::Split { " split" } else { "" }),
            moved,
            us,
            [tokens, rows, cols],
        );
        Ok(())
    }
}
