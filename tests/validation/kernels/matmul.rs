//! Products in tiles, all quantised types, dense and by expert.

use cuda_std::U32x4;
use gpu_kernels::blocks::GgmlType;
use gpu_kernels::kernels::matmul::{TILES, Tile};
use gpu_kernels::params::Activations;
use host::gpu::ops::{
    Experts, FloatProduct, Matvec, OpError, RouteGroups, Tiles, dense_tile, expert_tile, matmul_float, matmul_q8, matvec_q8,
    max_tiles, route_groups, takes_q8,
};
use host::gpu::{Device, Emulated};

use super::formats::{dequantize, random_blocks};
use super::matvec::{Input, dot, tolerance};
use super::{Output, Random, Weights, assert_close, assert_same_bits, devices, input};

fn types() -> impl Iterator<Item = GgmlType> {
    GgmlType::ALL.iter().copied().filter(|ty| takes_q8(*ty))
}

/// One dense product of `[tokens, cols]` with `[rows, cols]`, onto what is there and with a bias where `onto`:
/// against the definition, against the matvec, and again.
fn check_dense<D: Device>(device: &D, ty: GgmlType, tile: Tile, [tokens, rows, cols]: [u32; 3], onto: bool) {
    let mut random = Random::new(u64::from(tokens * 31 + rows * 7 + cols) + ty as u64);
    let file = random_blocks(&mut random, ty, (rows * cols) as usize);
    let values = dequantize(ty, &file);
    let w = Weights::new(device, ty, [1, rows, cols], &file);
    let x = Input::new(device, &random.units((tokens * cols) as usize), cols);
    let (y_stride, n) = (rows + 3, (tokens * (rows + 3)) as usize);
    let (before, bias) = (random.units(n), random.units(rows as usize));
    let bias_device = input(device, &bias);
    let run = |run: &dyn Fn(&Matvec<'_>) -> Result<u64, OpError>| {
        let y = Output::holding(device, &before);
        let op = Matvec {
            y_stride,
            accumulate: onto,
            bias: onto.then(|| bias_device.slice()),
            dependent: true,
            ..Matvec::new(w.matrix(), y.slice(), tokens)
        };
        run(&op).expect("a product");
        y.read(device)
    };
    let tiled = |op: &Matvec<'_>| matmul_q8(device, op, x.q8(), Tiles::Dense(tile));
    let got = run(&tiled);
    let what = format!("{ty} {tokens}x{rows}x{cols} in {}", tile.tokens);
    assert_same_bits(&what, &got, &run(&tiled));

    let vector = run(&|op| matvec_q8(device, op, x.q8()));
    let (mut all, mut wanted, mut bounds) = (Vec::new(), Vec::new(), Vec::new());
    for (t, x) in x.values(Activations::Q8).chunks_exact(cols as usize).enumerate() {
        let row = |all: &[f32]| all[t * y_stride as usize..][..y_stride as usize].to_vec();
        let (got, vector, before) = (row(&got), row(&vector), row(&before));
        assert_eq!(got[rows as usize..], before[rows as usize..], "{what}: past the rows");
        for (r, w) in values.chunks_exact(cols as usize).enumerate() {
            let (sum, size) = dot(w, x);
            let more = if onto { f64::from(before[r]) + f64::from(bias[r]) } else { 0.0 };
            let bound = tolerance(cols) * (size + if onto { 2.0 } else { 0.0 });
            let apart = (f64::from(got[r]) - f64::from(vector[r])).abs();
            assert!(apart <= bound, "{what} [{t}, {r}]: {} is {} by the matvec", got[r], vector[r]);
            all.push(got[r]);
            wanted.push(sum + more);
            bounds.push(bound);
        }
    }
    assert_close(&what, &all, &wanted, |i| bounds[i]);
}

/// One product with float weights, as in [`check_dense`].
fn check_float<D: Device>(device: &D, ty: GgmlType, shape: [u32; 3], form: FloatProduct, onto: bool) {
    let [tokens, rows, cols] = shape;
    let mut random = Random::new(u64::from(tokens * 31 + rows * 7 + cols) + ty as u64);
    let file = random_blocks(&mut random, ty, (rows * cols) as usize);
    let values = dequantize(ty, &file);
    let w = Weights::new(device, ty, [1, rows, cols], &file);
    let (x_stride, y_stride) = (cols + 4, rows + 3);
    let x = random.units((tokens * x_stride) as usize);
    let (before, bias) = (random.units((tokens * y_stride) as usize), random.units(rows as usize));
    let (x_device, bias_device) = (input(device, &x), input(device, &bias));
    let run = || {
        let y = Output::holding(device, &before);
        let bias = onto.then(|| bias_device.slice());
        let op =
            Matvec { y_stride, accumulate: onto, bias, dependent: true, ..Matvec::new(w.matrix(), y.slice(), tokens) };
        matmul_float(device, &op, x_device.slice(), x_stride, form).expect("a product");
        y.read(device)
    };
    let got = run();
    let what = format!("{ty} {tokens}x{rows}x{cols} {form:?}");
    // Both factors in two parts of bf16, without the product of the small ones.
    let rounded = if form == FloatProduct::Split { 3.0 * 2f64.powi(-18) } else { 0.0 };
    assert_same_bits(&what, &got, &run());
    let (mut wanted, mut bounds) = (Vec::new(), Vec::new());
    for t in 0..tokens as usize {
        let x: Vec<f64> = x[t * x_stride as usize..][..cols as usize].iter().map(|x| f64::from(*x)).collect();
        let before = &before[t * y_stride as usize..][..y_stride as usize];
        for (r, w) in values.chunks_exact(cols as usize).enumerate() {
            let (sum, size) = dot(w, &x);
            let more = if onto { f64::from(before[r]) + f64::from(bias[r]) } else { 0.0 };
            wanted.push(sum + more);
            // One sum along the columns, and two additions.
            bounds.push(f64::from(cols + 2) * 2f64.powi(-24) * (size + 2.0) + rounded * size);
        }
        wanted.extend(before[rows as usize..].iter().map(|x| f64::from(*x)));
        bounds.extend([0.0; 3]);
    }
    assert_close(&what, &got, &wanted, |i| bounds[i]);
}

/// Routes with so many for each expert, mixed.
pub(super) fn mixed_ids(random: &mut Random, counts: &[u32]) -> Vec<u32> {
    let ids: Vec<u32> = (0..).zip(counts).flat_map(|(e, n)| vec![e; *n as usize]).collect();
    random.permutation(ids.len() as u32).into_iter().map(|i| ids[i as usize]).collect()
}

/// One product of experts, with a bias, onto what is there.
fn check_experts<D: Device>(device: &D, ty: GgmlType, tile: Tile, counts: &[u32], n_used: u32, shared_x: bool) {
    let [n_expert, rows, cols] = [counts.len() as u32, 37, if ty == GgmlType::Q8_0 { 160 } else { 256 }];
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
    matmul_q8(device, &op, x.q8(), Tiles::Experts(groups)).expect("a product");
    let got: Vec<f32> = y.read(device);
    let (mut wanted, mut bounds) = (Vec::new(), Vec::new());
    for (route, id) in ids.iter().enumerate() {
        let x_row = if shared_x { route / n_used as usize } else { route };
        let x = &x.values(Activations::Q8)[x_row * cols as usize..][..cols as usize];
        for r in 0..rows as usize {
            let row = *id as usize * rows as usize + r;
            let (sum, size) = dot(&values[row * cols as usize..][..cols as usize], x);
            wanted.push(sum + f64::from(bias[row]) + f64::from(before[route * rows as usize + r]));
            bounds.push(tolerance(cols) * (size + 2.0));
        }
    }
    assert_close(&format!("{ty} experts in {}", tile.tokens), &got, &wanted, |i| bounds[i]);
}

devices! {
    /// Every type in every tile, at sizes one off the tile's, and columns that end inside a step.
    fn matmul_of_every_type_and_tile(device) {
        for ty in types() {
            for tile in TILES {
                let n = tile.tokens;
                let cols = if ty.block_elems() == 256 { 768 } else { 672 };
                check_dense(device, ty, tile, [n + 1, tile.rows + 5, 256], false);
                check_dense(device, ty, tile, [n - 1, 9, cols], true);
            }
        }
    }

    /// Several tiles each way; a single token; columns of one block, and many steps.
    fn matmul_at_other_sizes(device) {
        for tile in TILES {
            let n = tile.tokens;
            check_dense(device, GgmlType::Q8_0, tile, [1, 3, 32], false);
            check_dense(device, GgmlType::Q5K, tile, [n, 33, 512], true);
            if n <= 32 {
                check_dense(device, GgmlType::Q4K, tile, [3 * n + 5, 70, 512], false);
                check_dense(device, GgmlType::Q4_0, tile, [n - 1, 7, 2880], false);
            }
        }
        check_dense(device, GgmlType::Q8_0, TILES[0], [5, 6, 4096], true);
        check_dense(device, GgmlType::Q4K, TILES[3], [30, 12, 2048], true);
    }

    fn matmul_of_experts(device) {
        for (i, ty) in types().enumerate() {
            for tile in TILES {
                // Around the smaller tiles; the larger see several of them in one.
                let shared_x = (i + tile.tokens as usize / 8).is_multiple_of(2);
                check_experts(device, ty, tile, &[0, 1, 15, 16, 17, 0, 1], 2, shared_x);
            }
        }
        check_experts(device, GgmlType::Q4K, TILES[1], &[0, 0, 50, 0], 5, true);
        check_experts(device, GgmlType::Q8_0, TILES[4], &[140], 4, false);
    }

    fn matmul_of_float_weights(device) {
        for (i, ty) in [GgmlType::F32, GgmlType::F16, GgmlType::Bf16].into_iter().enumerate() {
            let shapes = [[63, 33, 40], [65, 31, 64], [1, 1, 8], [130, 70, 136], [9, 7, 264], [47, 9, 40]];
            for (j, shape) in shapes.into_iter().enumerate() {
                for form in [FloatProduct::Exact, FloatProduct::Split] {
                    check_float(device, ty, shape, form, (i + j) % 2 == 0);
                }
            }
        }
        for form in [FloatProduct::Exact, FloatProduct::Split] {
            check_float(device, GgmlType::F32, [7, 3, 2052], form, true);
            check_float(device, GgmlType::F32, [48, 40, 516], form, false);
        }
    }

    fn matmul_refuses_bad_shapes(device) {
        let (ty, cols, rows) = (GgmlType::Q8_0, 64, 4);
        let w = Weights::new(device, ty, [1, rows, cols], &[0; 8 * 34]);
        let stack = Weights::new(device, ty, [2, 2, cols], &[0; 8 * 34]);
        let floats = Weights::new(device, GgmlType::F32, [1, rows, cols], &[0; 1024]);
        let x = Input::new(device, &[0.0; 128], cols);
        let y = device.alloc_zeroed::<f32>(8).expect("memory");
        let (ids, order) = (input(device, &[0u32; 2]), input(device, &[0u32, 1]));
        let tiles = input(device, &[U32x4::splat(0); 2]);
        let dense = Tiles::Dense(TILES[0]);
        let op = Matvec::new(w.matrix(), y.slice(), 2);
        let refused = |op: &Matvec<'_>, tiles| {
            matches!(matmul_q8(device, op, x.q8(), tiles), Err(OpError::Operand { .. }))
        };
        assert!(!refused(&op, dense), "the shape that the others are changed from");
        assert!(refused(&Matvec { tokens: 3, ..op }, dense), "no room in y, no rows of x");
        assert!(refused(&Matvec { y_stride: 3, ..op }, dense), "rows of y overlap");
        assert!(refused(&Matvec { bias: Some(y.slice()), ..op }, dense), "bias overlaps y");
        let mut other = TILES[0];
        other.rows = 16;
        assert!(refused(&op, Tiles::Dense(other)), "a tile that is none");
        let groups = RouteGroups { order: order.slice(), tiles: tiles.slice(), tile: TILES[0] };
        assert!(refused(&op, Tiles::Experts(groups)), "tiles of experts for a dense product");
        let experts = Some(Experts { ids: ids.slice(), ids_stride: 1, n_used: 1, shared_x: true });
        let routed = Matvec { w: stack.matrix(), y_stride: 2, experts, ..op };
        assert!(!refused(&routed, Tiles::Experts(groups)), "as it should be");
        assert!(refused(&routed, dense), "experts without tiles of theirs");
        let short = RouteGroups { tiles: tiles.part(..1).expect("inside"), ..groups };
        assert!(refused(&routed, Tiles::Experts(short)), "too few tiles");
        let short = RouteGroups { order: order.part(..1).expect("inside"), ..groups };
        assert!(refused(&routed, Tiles::Experts(short)), "too short an order");
        assert_eq!(matmul_q8(device, &Matvec { tokens: 0, ..op }, x.q8(), dense).expect("nothing to do"), 0);
        let float = Matvec { w: floats.matrix(), ..op };
        assert!(matches!(matmul_q8(device, &float, x.q8(), dense), Err(OpError::Type { .. })), "no such kernel");

        let values = input(device, &[0.0f32; 128]);
        let refused = |op: &Matvec<'_>, stride| {
            matches!(matmul_float(device, op, values.slice(), stride, FloatProduct::Split), Err(OpError::Operand { .. }))
        };
        assert!(!refused(&float, 64), "the shape that the others are changed from");
        assert!(refused(&float, 60) && refused(&float, 66) && refused(&float, 68), "rows of x overlap, lie askew, end");
        assert!(refused(&Matvec { y_stride: 3, ..float }, 64), "rows of y overlap");
        assert!(refused(&routed, 64), "no tiles of experts");
        let quantised = matmul_float(device, &op, values.slice(), 64, FloatProduct::Exact);
        assert!(matches!(quantised, Err(OpError::Type { .. })), "no such kernel");
    }
}

#[test]
fn tiles_are_as_large_as_their_tokens_and_the_grid_allow() {
    let device = Emulated::new();
    let mut properties = device.properties().clone();
    properties.n_sm = 132;
    let dense = |rows, tokens| dense_tile(&properties, rows, tokens).map_or(0, |tile| tile.tokens);
    // Full grids take what the tokens need, at most.
    assert_eq!([4, 5, 8, 9, 32].map(|tokens| dense(8192, tokens)), [0, 8, 8, 16, 32]);
    assert_eq!([512, 2048].map(|tokens| dense(8192, tokens)), [128, 128]);
    // Few rows take small tiles, to have more of them.
    assert_eq!([8, 9, 32, 512, 2048].map(|tokens| dense(512, tokens)), [0, 8, 8, 32, 32]);
    let experts = [(512, 256), (4096, 256), (16384, 256), (65536, 256), (64, 256), (72, 32)];
    assert_eq!(experts.map(|(routes, n)| expert_tile(routes, n).tokens), [8, 32, 64, 128, 8, 8]);
}
