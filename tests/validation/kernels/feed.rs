//! Tokens and positions of a step from the step before.

use host::gpu::ops::{self, Fed, NOT_FED};
use host::gpu::{Device, Slice};

use super::{Output, devices, input};

/// Feeds, and returns tokens, positions, starts and the word.
fn feed<D: Device>(device: &D, rows: usize, spans: usize, fresh: u32) -> [Vec<u32>; 4] {
    let values = |n: usize, from: u32| (0..n as u32).map(|i| from + 3 * i).collect::<Vec<_>>();
    // Every third row keeps its token; the others take them in reverse.
    let from: Vec<u32> = (0..rows).map(|r| if r % 3 == 2 { NOT_FED } else { (rows - 1 - r) as u32 }).collect();
    let (from, chosen) = (input(device, &from), input(device, &values(rows, 5000)));
    let tokens = Output::holding(device, &values(rows, 100));
    let pos = Output::holding(device, &values(rows, 200));
    let start = Output::holding(device, &values(spans, 300));
    let word = Output::holding(device, &[fresh]);
    let (tokens_at, pos_at, start_at) = (tokens.slice(), pos.slice(), start.slice());
    let fed = Fed { tokens: tokens_at, pos: pos_at, start: start_at, from: from.slice(), fresh: word.slice() };
    // SAFETY: what rows are fed from is below `rows`.
    #[expect(unsafe_code, reason = "indices in device memory")]
    unsafe { ops::feed(device, &fed, chosen.slice()) }.expect("good operands");
    [tokens.read(device), pos.read(device), start.read(device), word.read(device)]
}

devices! {
    fn rows_get_their_tokens_and_move_on_unless_fresh(device) {
        for (rows, spans) in [(1, 1), (2, 1), (31, 7), (256, 256), (700, 300)] {
            for fresh in [0, 1] {
                let [tokens, pos, start, word] = feed(device, rows, spans, fresh);
                for (r, token) in tokens.into_iter().enumerate() {
                    let want = if r % 3 == 2 { 100 + 3 * r } else { 5000 + 3 * (rows - 1 - r) };
                    assert_eq!(token as usize, want, "row {r} of {rows}");
                }
                let moved = 1 - fresh as usize;
                assert!(pos.iter().enumerate().all(|(r, pos)| *pos as usize == 200 + 3 * r + moved), "{rows}");
                assert!(start.iter().enumerate().all(|(s, start)| *start as usize == 300 + 3 * s + moved), "{spans}");
                assert_eq!(word, [0]);
            }
        }
    }

    fn bad_operands_are_refused(device) {
        let words = input(device, &[0u32; 64]);
        let part = |from: usize, len: usize| words.part(from..from + len).expect("inside");
        let good = Fed { tokens: part(0, 8), pos: part(8, 8), start: part(16, 2), from: part(18, 8), fresh: part(26, 1) };
        let run = |fed: Fed<'_>, chosen: Slice<'_, u32>| {
            // SAFETY: every row is fed from output 0.
            #[expect(unsafe_code, reason = "indices in device memory")]
            unsafe { ops::feed(device, &fed, chosen) }.map_err(|e| e.to_string())
        };
        run(good, part(40, 8)).expect("good operands");
        for bad in [
            Fed { pos: part(8, 7), ..good },
            Fed { from: part(18, 7), ..good },
            Fed { fresh: part(26, 2), ..good },
            Fed { start: part(15, 2), ..good },
        ] {
            assert!(run(bad, part(40, 8)).expect_err("bad operands").starts_with("feed: "));
        }
        assert!(run(good, part(4, 8)).expect_err("overlapping operands").contains("overlaps"));
    }
}
