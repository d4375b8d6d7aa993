//! Products of warpgroups: bf16 factors, all quantised types, dense and by expert.

use cuda_std::U32x4;
use gpu_kernels::blocks::GgmlType;
use gpu_kernels::kernels::matmul::TILES;
use gpu_kernels::kernels::matmul::Tile;
use gpu_kernels::kernels::matmul::wide::WIDE_TILES;
use half::bf16;
use host::gpu::ops::{
    Bf16, Experts, Matvec, OpError, RouteGroups, Tiles, matmul_wide, max_tiles, route_groups, takes_q8, to_bf16,
    wide_dense_tile, wide_expert_tile,
};
use host::gpu::{Buffer, Device, Emulated};

use super::formats::{Value, dequantize, random_blocks};
use super::matmul::mixed_ids;
use super::matvec::dot;
use super::{Output, Random, Weights, assert_close, assert_same_bits, devices, input};

fn types() -> impl Iterator<Item = GgmlType> {
    GgmlType::ALL.iter().copied().filter(|ty| takes_q8(*ty))
}

/// Activations on a device, and the values that they are rounded to.
struct Input<D: Device> {
    x: Buffer<D, u16>,
    cols: u32,
    values: Vec<f64>,
}

impl<D: Device> Input<D> {
    fn new(device: &D, x: &[f32], cols: u32) -> Self {
        let (from, to) = (input(device, x), device.alloc(x.len()).expect("memory"));
        let out = Bf16 { x: to.slice(), cols };
        to_bf16(device, from.slice(), cols, out, x.len() as u32 / cols).expect("to_bf16");
        Input { x: to, cols, values: x.iter().map(|x| bf16::from_f32(*x).to_f64()).collect() }
    }

    fn bf16(&self) -> Bf16<'_> {
        Bf16 { x: self.x.slice(), cols: self.cols }
    }

    fn row(&self, row: usize) -> &[f64] {
        &self.values[row * self.cols as usize..][..self.cols as usize]
    }
}

/// How far a weight may be off, of the size of its terms: its scale is rounded to 8 bits, by 2⁻⁸ at most, and so are
/// what is left of a minimum and the result.
const WEIGHT: f64 = 3.0 / 256.0;

/// Sums in f32, in an order and with a precision of their own: the tensor cores cut what they align.
fn tolerance(cols: u32) -> f64 {
    f64::from(cols + 8) * 2f64.powi(-23)
}

/// `Σ w·x`, and how far a product may be from it.
fn sum(w: &[Value], x: &[f64], cols: u32) -> (f64, f64) {
    let (sum, size) = dot(w, x);
    (sum, size * (WEIGHT + tolerance(cols)))
}

/// One dense product of `[tokens, cols]` with `[rows, cols]`, onto what is there and with a bias where `onto`.
fn check_dense<D: Device>(device: &D, ty: GgmlType, tile: Tile, [tokens, rows, cols]: [u32; 3], onto: bool) {
    let mut random = Random::new(u64::from(tokens * 31 + rows * 7 + cols) + ty as u64);
    let file = random_blocks(&mut random, ty, (rows * cols) as usize);
    let values = dequantize(ty, &file);
    let w = Weights::new(device, ty, [1, rows, cols], &file);
    let x = Input::new(device, &random.units((tokens * cols) as usize), cols);
    let (y_stride, n) = (rows + 3, (tokens * (rows + 3)) as usize);
    let (before, bias) = (random.units(n), random.units(rows as usize));
    let bias_device = input(device, &bias);
    let run = || {
        let y = Output::holding(device, &before);
        let bias = onto.then(|| bias_device.slice());
        let op =
            Matvec { y_stride, accumulate: onto, bias, dependent: true, ..Matvec::new(w.matrix(), y.slice(), tokens) };
        matmul_wide(device, &op, x.bf16(), Tiles::Dense(tile)).expect("a product");
        y.read(device)
    };
    let got = run();
    let what = format!("{ty} {tokens}x{rows}x{cols} in {}", tile.tokens);
    assert_same_bits(&what, &got, &run());
    let (mut wanted, mut bounds) = (Vec::new(), Vec::new());
    for t in 0..tokens as usize {
        let before = &before[t * y_stride as usize..][..y_stride as usize];
        for (r, w) in values.chunks_exact(cols as usize).enumerate() {
            let (sum, bound) = sum(w, x.row(t), cols);
            let more = if onto { f64::from(before[r]) + f64::from(bias[r]) } else { 0.0 };
            wanted.push(sum + more);
            bounds.push(bound + 1e-6);
        }
        wanted.extend(before[rows as usize..].iter().map(|x| f64::from(*x)));
        bounds.extend([0.0; 3]);
    }
    assert_close(&what, &got, &wanted, |i| bounds[i]);
}

/// One product of experts, with a bias, onto what is there.
fn check_experts<D: Device>(device: &D, ty: GgmlType, tile: Tile, counts: &[u32], n_used: u32, shared_x: bool) {
    let [n_expert, rows, cols] = [counts.len() as u32, 37, if ty.block_elems() == 32 { 160 } else { 256 }];
    let mut random = Random::new(u64::from(tile.tokens) + ty as u64);
    let ids = mixed_ids(&mut random, counts);
    let (routes, tokens) = (ids.len() as u32, ids.len() as u32 / n_used);
    assert_eq!(routes, tokens * n_used);
    let file = random_blocks(&mut random, ty, (n_expert * rows * cols) as usize);
    let values = dequantize(ty, &file);
    let w = Weights::new(device, ty, [n_expert, rows, cols], &file);
    let x_rows = if shared_x { tokens } else { routes };
    let x = Input::new(device, &random.units((x_rows * cols) as usize), cols);
    let (bias, before) = (random.units((n_expert * rows) as usize), random.units((routes * rows) as usize));
    let (ids_device, bias_device) = (input(device, &ids), input(device, &bias));
    let order = device.alloc::<u32>(routes as usize).expect("memory");
    let tiles = device.alloc::<U32x4>(max_tiles(routes, n_expert) as usize).expect("memory");
    let groups = RouteGroups { order: order.slice(), tiles: tiles.slice(), tile };
    let experts = Experts { ids: ids_device.slice(), ids_stride: n_used, n_used, shared_x };
    route_groups(device, &experts, tokens, n_expert, groups).expect("route_groups");
    let y = Output::holding(device, &before);
    let op = Matvec {
        bias: Some(bias_device.slice()),
        experts: Some(experts),
        accumulate: true,
        dependent: true,
        ..Matvec::new(w.matrix(), y.slice(), tokens)
    };
    matmul_wide(device, &op, x.bf16(), Tiles::Experts(groups)).expect("a product");
    let got: Vec<f32> = y.read(device);
    let (mut wanted, mut bounds) = (Vec::new(), Vec::new());
    for (route, id) in ids.iter().enumerate() {
        let x = x.row(if shared_x { route / n_used as usize } else { route });
        for r in 0..rows as usize {
            let row = *id as usize * rows as usize + r;
            let (sum, bound) = sum(&values[row * cols as usize..][..cols as usize], x, cols);
            wanted.push(sum + f64::from(bias[row]) + f64::from(before[route * rows as usize + r]));
            bounds.push(bound + 1e-6);
        }
    }
    assert_close(&format!("{ty} experts in {}", tile.tokens), &got, &wanted, |i| bounds[i]);
}

/// Every weight by itself: token k is the k-th unit vector, so `y[k, r] = w[r, k]`.
fn check_weights<D: Device>(device: &D, ty: GgmlType, tile: Tile) {
    let (rows, cols) = (21, 256);
    let file = random_blocks(&mut Random::new(ty as u64), ty, (rows * cols) as usize);
    let values = dequantize(ty, &file);
    let w = Weights::new(device, ty, [1, rows, cols], &file);
    let units: Vec<f32> = (0..cols * cols).map(|i| f32::from(u8::from(i % cols == i / cols))).collect();
    let x = Input::new(device, &units, cols);
    let y = Output::new(device, (rows * cols) as usize);
    matmul_wide(device, &Matvec::new(w.matrix(), y.slice(), cols), x.bf16(), Tiles::Dense(tile)).expect("a product");
    let transposed = |i: usize| &values[i % rows as usize * cols as usize + i / rows as usize];
    let wanted: Vec<f64> = (0..values.len()).map(|i| transposed(i).sum()).collect();
    assert_close(&format!("{ty} in {}", tile.tokens), &y.read(device), &wanted, |i| WEIGHT * transposed(i).size());
}

/// Whether the device has these products; where not, that is said.
fn has_wgmma<D: Device>(device: &D) -> bool {
    let has = device.properties().wgmma;
    if !has {
        println!("skipped: {} has no wgmma", device.properties().name);
    }
    has
}

devices! {
    /// Of each 16 elements first the words of 0 and 2, 4 and 6, …, then those of 1 and 3, 5 and 7, ….
    fn to_bf16_rounds_and_orders(device) {
        for (rows, cols, stride) in [(1, 16, 16), (3, 48, 52), (2, 1040, 1040), (5, 2048, 2052)] {
            let x = Random::new(9).units((rows * stride) as usize);
            let y = Output::<D, u16>::new(device, (rows * cols) as usize);
            let x_device = input(device, &x);
            to_bf16(device, x_device.slice(), stride, Bf16 { x: y.slice(), cols }, rows).expect("to_bf16");
            for (at, got) in (0u32..).zip(y.read(device)) {
                let (row, column) = (at / cols, at % cols);
                let from = column / 16 * 16 + column % 8 / 2 * 4 + column % 2 * 2 + column / 8 % 2;
                assert_eq!(got, bf16::from_f32(x[(row * stride + from) as usize]).to_bits(), "row {row}, {column}");
            }
        }
        let (x, y) = (input(device, &[0.0f32; 64]), device.alloc::<u16>(64).expect("memory"));
        let refused = |cols, stride, rows| {
            matches!(to_bf16(device, x.slice(), stride, Bf16 { x: y.slice(), cols }, rows), Err(OpError::Operand { .. }))
        };
        assert!(!refused(32, 32, 2), "the shape that the others are changed from");
        assert!(refused(24, 32, 2) && refused(32, 30, 2) && refused(32, 32, 3) && refused(64, 32, 1));
    }

    fn wide_products_have_every_weight_in_its_place(device) {
        if has_wgmma(device) {
            for (i, ty) in types().enumerate() {
                check_weights(device, ty, WIDE_TILES[i % 2]);
                check_weights(device, ty, WIDE_TILES[(i + 1) % 2]);
            }
        }
    }

    /// Sizes around tiles, steps and sixteens; columns that end inside a step; more steps than stages.
    fn wide_products_at_odd_sizes(device) {
        if !has_wgmma(device) {
            return;
        }
        let [small, large] = WIDE_TILES;
        for (i, ty) in types().enumerate() {
            let cols = if ty.block_elems() == 256 { 256 } else { 96 };
            check_dense(device, ty, WIDE_TILES[i % 2], [17, 9, cols], i % 3 == 0);
        }
        for (tokens, rows, cols) in [(65, 129, 32), (64, 128, 64), (33, 5, 672), (1, 1, 32), (15, 130, 480)] {
            check_dense(device, GgmlType::Q8_0, small, [tokens, rows, cols], tokens == 33);
        }
        for (tokens, rows, cols) in [(129, 257, 256), (97, 3, 768), (80, 2, 256), (128, 5, 256), (112, 2, 256)] {
            check_dense(device, GgmlType::Q4K, large, [tokens, rows, cols], tokens == 97);
        }
        check_dense(device, GgmlType::Q6K, large, [20, 7, 1024], true);
        check_dense(device, GgmlType::Q5K, small, [48, 7, 1280], true);
        check_dense(device, GgmlType::Mxfp4, large, [3, 7, 2880], false);
    }

    fn wide_products_of_experts(device) {
        if !has_wgmma(device) {
            return;
        }
        for (i, ty) in types().enumerate() {
            let counts = [0, 1, 15, 16, 17, 0, 1];
            check_experts(device, ty, WIDE_TILES[i % 2], &counts, 2, i.is_multiple_of(4));
        }
        check_experts(device, GgmlType::Q4K, WIDE_TILES[0], &[0, 0, 150, 0], 5, true);
        check_experts(device, GgmlType::Q5K, WIDE_TILES[1], &[140], 4, false);
        check_experts(device, GgmlType::Q4K, WIDE_TILES[1], &[70, 100, 33], 7, true);
    }

    fn wide_products_refuse_bad_shapes(device) {
        let (ty, cols, rows) = (GgmlType::Q8_0, 64, 4);
        let w = Weights::new(device, ty, [1, rows, cols], &[0; 8 * 34]);
        let floats = Weights::new(device, GgmlType::F32, [1, rows, cols], &[0; 1024]);
        let (x, short) = (Input::new(device, &[0.0; 128], cols), Input::new(device, &[0.0; 64], 32));
        let y = device.alloc_zeroed::<f32>(8).expect("memory");
        let dense = Tiles::Dense(WIDE_TILES[0]);
        let op = Matvec::new(w.matrix(), y.slice(), 2);
        let refused = |op: &Matvec<'_>, x: &Input<D>, tiles| {
            matches!(matmul_wide(device, op, x.bf16(), tiles), Err(OpError::Operand { .. }))
        };
        assert_eq!(refused(&op, &x, dense), !device.properties().wgmma, "the shape that the others are changed from");
        assert!(refused(&Matvec { tokens: 3, ..op }, &x, dense), "no room in y, no rows of x");
        assert!(refused(&op, &short, dense), "columns of x");
        assert!(refused(&op, &x, Tiles::Dense(TILES[3])), "a tile of other kernels");
        assert_eq!(matmul_wide(device, &Matvec { tokens: 0, ..op }, x.bf16(), dense).expect("nothing to do"), 0);
        if has_wgmma(device) {
            let float = Matvec { w: floats.matrix(), ..op };
            assert!(matches!(matmul_wide(device, &float, x.bf16(), dense), Err(OpError::Type { .. })), "no such kernel");
        }
    }
}

#[test]
fn devices_without_these_products_refuse_them() {
    let device = Emulated::new().without_wgmma();
    let w = Weights::new(&device, GgmlType::Q8_0, [1, 1, 32], &[0; 34]);
    let x = Input::new(&device, &[0.0; 32], 32);
    let y = device.alloc_zeroed::<f32>(1).expect("memory");
    let op = Matvec::new(w.matrix(), y.slice(), 1);
    assert!(matmul_wide(&device, &op, x.bf16(), Tiles::Dense(WIDE_TILES[0])).is_err());
    assert_eq!(wide_dense_tile(device.properties(), 4096, 4096), None);
    assert_eq!(wide_expert_tile(device.properties(), 4096, 1), None);
}

#[test]
fn wide_tiles_are_as_large_as_their_tokens_and_the_grid_allow() {
    let device = Emulated::new();
    let mut properties = device.properties().clone();
    properties.n_sm = 132;
    let dense = [(8192, 2048), (8192, 512), (512, 2048), (64, 2048)];
    assert_eq!(dense.map(|(rows, n)| wide_dense_tile(&properties, rows, n).map_or(0, |t| t.tokens)), [128, 64, 64, 0]);
    let experts = [(512, 256), (4096, 256), (16384, 256), (8192, 32)];
    let expert = |(routes, n)| wide_expert_tile(&properties, routes, n).map_or(0, |tile| tile.tokens);
    assert_eq!(experts.map(expert), [0, 64, 128, 128]);
}
