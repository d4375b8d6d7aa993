//! Routes by expert, against a stable sort.

use cuda_std::U32x4;
use gpu_kernels::kernels::grouped;
use gpu_kernels::kernels::matmul::{TILES, Tile};
use host::gpu::Device;
use host::gpu::ops::{Experts, OpError, RouteGroups, max_tiles, route_groups};

use super::{Output, Random, devices, input};

/// Ids of routes, some of which are past the last expert.
fn random_ids(random: &mut Random, routes: u32, n_expert: u32) -> Vec<u32> {
    (0..routes).map(|_| random.below(u64::from(n_expert) + u64::from(n_expert) / 4 + 1) as u32).collect()
}

fn check<D: Device>(device: &D, ids: &[u32], n_used: u32, n_expert: u32) {
    let routes = ids.len() as u32;
    let experts = input(device, ids);
    let experts = Experts { ids: experts.slice(), ids_stride: n_used, n_used, shared_x: true };
    for tile in TILES.into_iter().chain([grouped::TILE_SIZE]) {
        let order = Output::<D, u32>::new(device, ids.len());
        let tiles = Output::<D, U32x4>::new(device, max_tiles(routes, n_expert) as usize);
        let groups = RouteGroups { order: order.slice(), tiles: tiles.slice(), tile };
        route_groups(device, &experts, routes / n_used, n_expert, groups).expect("route_groups");
        let (order, tiles) = (order.read(device), tiles.read(device));

        let mut wanted: Vec<u32> = (0..routes).collect();
        let expert = |route: u32| ids[route as usize].min(n_expert - 1);
        wanted.sort_by_key(|route| expert(*route)); // stable
        assert_eq!(order, wanted, "{routes} routes, {n_expert} experts");
        // All of the order, in its order; each tile of one expert and no longer than it may be.
        let n_tiles = (routes / tile.tokens + n_expert).min(routes) as usize;
        let mut next = 0;
        for entry in tiles[..n_tiles].iter().filter(|entry| entry.z > 0) {
            assert_eq!(entry.y, next, "{routes} routes, {n_expert} experts, tiles of {}", tile.tokens);
            assert!(entry.z <= tile.tokens);
            let routes = &order[entry.y as usize..(entry.y + entry.z) as usize];
            assert!(routes.iter().all(|route| expert(*route) == entry.x));
            next += entry.z;
        }
        assert_eq!(next, routes);
        // No expert takes more tiles than it needs.
        for e in 0..n_expert {
            let n = ids.iter().filter(|id| (**id).min(n_expert - 1) == e).count() as u32;
            let used = tiles[..n_tiles].iter().filter(|entry| entry.z > 0 && entry.x == e).count() as u32;
            assert_eq!(used, n.div_ceil(tile.tokens), "expert {e} of {n} routes");
        }
    }
}

devices! {
    fn routes_are_sorted_and_cut_into_tiles(device) {
        let mut random = Random::new(21);
        for (tokens, n_used, n_expert) in [(1, 1, 1), (9, 2, 4), (33, 1, 7), (67, 8, 32), (130, 8, 3)] {
            check(device, &random_ids(&mut random, tokens * n_used, n_expert), n_used, n_expert);
        }
        // All on one expert, on the first, on the last.
        for id in [0, 5, 9] {
            check(device, &[id; 150], 2, 10);
        }
        // Experts of 0, 1, 15, 16, 17 routes: around the smaller tiles.
        let ids: Vec<u32> = [(0, 1), (2, 15), (3, 16), (5, 17)].into_iter().flat_map(|(e, n)| vec![e; n]).collect();
        let shuffled: Vec<u32> = random.permutation(49).into_iter().map(|i| ids[i as usize]).collect();
        check(device, &shuffled, 7, 6);
    }

    fn route_groups_refuses_bad_shapes(device) {
        let (ids, order) = (input(device, &[0u32; 16]), input(device, &[0u32; 16]));
        let tiles = device.alloc::<U32x4>(10).expect("memory"); // 16 routes in fours, and six experts
        let experts = Experts { ids: ids.slice(), ids_stride: 2, n_used: 2, shared_x: true };
        let groups = RouteGroups { order: order.slice(), tiles: tiles.slice(), tile: grouped::TILE_SIZE };
        route_groups(device, &experts, 8, 6, groups).expect("the shape that the others are changed from");
        let refused = |experts: &Experts<'_>, tokens, n_expert, groups| {
            matches!(route_groups(device, experts, tokens, n_expert, groups), Err(OpError::Operand { .. }))
        };
        assert!(refused(&experts, 9, 6, groups), "more routes than ids");
        assert!(refused(&experts, 8, 7, groups), "no room in tiles");
        assert!(refused(&experts, 8, 0, groups), "no experts");
        assert!(refused(&experts, 8, 1025, groups), "too many experts");
        assert!(refused(&experts, 0, 6, groups), "no routes");
        assert!(refused(&Experts { ids_stride: 3, ..experts }, 4, 6, groups), "ids apart");
        assert!(refused(&experts, 8, 6, RouteGroups { order: ids.slice(), ..groups }), "overlap");
        assert!(refused(&experts, 8, 6, RouteGroups { tile: Tile { tokens: 5, ..TILES[0] }, ..groups }), "a tile of no kernel");
    }
}
