//! Any order of arrivals, cancels, failures and steps: no reply is lost, mixed up or wrong, and no memory is left held.

use std::collections::HashMap;

use host::engine::mock::Script;
use host::engine::{FinishReason, Request, RequestId};
use proptest::prelude::*;

use super::{Sizes, assert_released, collect, drain, engine, prompt, request, solo};

#[derive(Debug, Clone)]
enum Op {
    Submit { n_prompt: usize, salt: u32, max_tokens: Option<u32> },
    Fail,
    Embed { n_prompt: usize },
    Cancel { nth: usize },
    Steps(u8),
}

/// A token that makes the batch fail.
const POISON: u32 = 210;

fn op() -> impl Strategy<Value = Op> {
    // Few salts, so that prompts share beginnings; lengths around the page borders.
    let n_prompt = prop_oneof![1usize..10, 60usize..70, 120usize..135, 1usize..180];
    let max_tokens = prop_oneof![3 => (0u32..80).prop_map(Some), 1 => Just(None)];
    prop_oneof![
        6 => (n_prompt, 0u32..3, max_tokens).prop_map(|(n_prompt, salt, max_tokens)| Op::Submit { n_prompt, salt, max_tokens }),
        1 => Just(Op::Fail),
        1 => (1usize..100).prop_map(|n_prompt| Op::Embed { n_prompt }),
        2 => (0usize..8).prop_map(|nth| Op::Cancel { nth }),
        6 => (1u8..40).prop_map(Op::Steps),
    ]
}

fn sizes() -> impl Strategy<Value = Sizes> {
    (any::<[bool; 3]>(), 1u32..5, 8u32..70, 3u32..20, 0u32..4, 0u32..4).prop_map(
        |([recurrent, reuse, chooses], n_slots, n_batch, n_pages, n_checkpoints, n_draft)| Sizes {
            recurrent,
            reuse,
            chooses,
            n_draft,
            n_slots,
            n_batch,
            n_pages,
            n_checkpoints,
            n_ctx: 192,
            n_queue: 1000,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_order_of_events_gives_the_solo_replies(
        sizes in sizes(),
        late in any::<bool>(),
        ops in prop::collection::vec(op(), 1..40),
    ) {
        let late = late && sizes.chooses && sizes.n_draft == 0;
        let [fail_on, fail_late_on] = [!late, late].map(|fails| fails.then_some(POISON));
        let (mut engine, _) = engine(sizes, Script { fail_on, fail_late_on, ..Script::default() });
        let mut replies = HashMap::new();
        let mut submitted: Vec<(RequestId, Vec<u32>, Option<u32>)> = Vec::new();
        for op in ops {
            match op {
                Op::Submit { n_prompt, salt, max_tokens } => {
                    let prompt = prompt(n_prompt, salt);
                    let id = engine.submit(Request { prompt: prompt.clone(), max_tokens, ..Request::default() });
                    submitted.push((id.expect("a good request"), prompt, max_tokens));
                }
                Op::Fail => drop(engine.submit(request(vec![POISON], 1)).expect("a good request")),
                Op::Embed { n_prompt } => drop(engine.submit_embedding(prompt(n_prompt, 1)).expect("a good request")),
                Op::Cancel { nth } => {
                    if let Some((id, ..)) = submitted.iter().rev().nth(nth) {
                        engine.cancel(*id);
                    }
                }
                Op::Steps(n) => (0..n).for_each(|_| collect(engine.step(), &mut replies)),
            }
        }
        drain(&mut engine, &mut replies);
        assert_released(&engine);
        for (id, prompt, max_tokens) in submitted {
            let reply = &replies[&id];
            let room = engine.n_ctx() as usize - prompt.len();
            let whole = solo(sizes, &prompt, max_tokens.map_or(room, |n| room.min(n as usize)));
            match &reply.reason {
                Some(FinishReason::Length) => prop_assert_eq!(&reply.ids, &whole),
                // Cancelled, or in the batch of a request that fails: what came is right, and it may all have come.
                Some(FinishReason::Cancelled) => prop_assert!(whole.starts_with(&reply.ids)),
                Some(FinishReason::Error(why)) => {
                    prop_assert!(why.contains(if late { "seen late" } else { "out of memory" }), "{}", why);
                    prop_assert!(whole.starts_with(&reply.ids));
                }
                other => prop_assert!(false, "{:?} ended with {:?}", id, other),
            }
        }
    }
}
