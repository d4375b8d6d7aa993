use super::*;

fn sampler(params: Sampling) -> Sampler {
    Sampler::new(params, &[], 8, None).expect("valid")
}

fn pick(params: Sampling, logits: &[f32]) -> u32 {
    sampler(params).sample(&mut logits.to_vec(), None).expect("a token").id
}

/// How often each of `logits.len()` tokens is drawn in `n` draws.
fn histogram(params: Sampling, logits: &[f32], n: usize) -> Vec<usize> {
    let mut sampler = sampler(Sampling { seed: Some(1), ..params });
    let mut counts = vec![0; logits.len()];
    for _ in 0..n {
        counts[sampler.sample(&mut logits.to_vec(), None).expect("a token").id as usize] += 1;
    }
    counts
}

fn hot() -> Sampling {
    Sampling { temperature: 1.0, ..Sampling::default() }
}

#[test]
fn greedy_takes_the_lowest_index_on_a_tie() {
    assert_eq!(pick(Sampling::default(), &[0.0, 3.0, 1.0, 3.0]), 1);
    assert_eq!(pick(Sampling::default(), &[-0.0, 0.0]), 0);
}

#[test]
fn nan_logits_are_an_error() {
    for bad in [f32::NAN, f32::INFINITY] {
        let e = sampler(hot()).sample(&mut [0.0, bad], None).expect_err("broken logits");
        assert!(matches!(e, SampleError::NotFinite { id: 1, .. }), "{e}");
    }
    let e = sampler(hot()).sample(&mut [f32::NEG_INFINITY; 3], None);
    assert_eq!(e, Err(SampleError::NothingAllowed));
}

#[test]
fn padded_rows_of_the_head_are_never_chosen() {
    let mut logits = vec![0.0; 10];
    logits[9] = 50.0;
    logits[3] = 1.0;
    assert_eq!(pick(Sampling::default(), &logits), 3);
    assert_eq!(histogram(hot(), &logits, 500)[8..], [0, 0]);
}

#[test]
fn draws_follow_the_probabilities() {
    let p = [0.5f32, 0.3, 0.15, 0.05];
    let logits = p.map(f32::ln);
    let n = 40_000;
    for (i, count) in histogram(hot(), &logits, n).into_iter().enumerate() {
        // Five standard deviations of a binomial.
        let (mean, p) = (n as f64 * f64::from(p[i]), f64::from(p[i]));
        let bound = 5.0 * (mean * (1.0 - p)).sqrt();
        assert!((count as f64 - mean).abs() < bound, "token {i}: {count}, expected {mean} ± {bound}");
    }
}

#[test]
fn temperature_sharpens_and_flattens() {
    let logits = [2.0, 0.0];
    let share = |t| histogram(Sampling { temperature: t, ..hot() }, &logits, 20_000)[0] as f64 / 20_000.0;
    let expected = |t: f64| 1.0 / (1.0 + (-2.0 / t).exp());
    for t in [0.5, 1.0, 4.0] {
        assert!((share(t) - expected(f64::from(t))).abs() < 0.02, "temperature {t}");
    }
    assert_eq!(share(1e-30), 1.0, "a tiny temperature is greedy, not an overflow");
}

#[test]
fn top_k_top_p_and_min_p_keep_what_they_should() {
    let logits = [0.5f32, 0.3, 0.15, 0.05].map(f32::ln);
    let kept = |s| histogram(s, &logits, 5_000).iter().map(|&c| c > 0).collect::<Vec<_>>();
    assert_eq!(kept(Sampling { top_k: 2, ..hot() }), [true, true, false, false]);
    assert_eq!(kept(Sampling { top_p: 0.79, ..hot() }), [true, true, false, false]);
    assert_eq!(kept(Sampling { top_p: 0.81, ..hot() }), [true, true, true, false]);
    assert_eq!(kept(Sampling { top_p: 0.0, ..hot() }), [true, false, false, false]);
    assert_eq!(kept(Sampling { min_p: 0.2, ..hot() }), [true, true, true, false]);
    // top_p is relative to what top_k left: 0.5 of 0.8 is 0.625.
    assert_eq!(kept(Sampling { top_k: 2, top_p: 0.6, ..hot() }), [true, false, false, false]);
}

#[test]
fn neutral_values_switch_off() {
    let logits = [1.0, 0.9, 0.8];
    for s in [
        Sampling { top_k: 0, ..hot() },
        Sampling { top_k: -1, ..hot() },
        Sampling { top_k: 1000, ..hot() },
        Sampling { top_p: 1.0, ..hot() },
        Sampling { min_p: 0.0, ..hot() },
        Sampling { repeat_penalty: 1.0, ..hot() },
    ] {
        assert_eq!(histogram(s, &logits, 300), histogram(hot(), &logits, 300));
    }
}

#[test]
fn a_wide_nucleus_is_found_past_the_first_ranks() {
    let n = 10_000u32;
    let mut c: Vec<_> = (0..n).rev().map(|id| Candidate { id, logit: 0.0 }).collect();
    keep_nucleus(&mut c, 0.5, |_| 1.0);
    assert_eq!(c.len(), 5000);
    assert!(c.iter().all(|c| c.id < 5000), "equals rank by id");
}

#[test]
fn penalties_count_reply_and_prompt_as_documented() {
    // Repetition: prompt and reply. Presence and frequency: the reply only.
    let run = |params: Sampling, prompt: &[u32], logits: [f32; 3], n: usize| {
        let mut s = Sampler::new(params, prompt, 3, None).expect("valid");
        (0..n).map(|_| s.sample(&mut logits.to_vec(), None).expect("a token").id).collect::<Vec<_>>()
    };
    let greedy = Sampling::default;
    assert_eq!(run(Sampling { repeat_penalty: 2.0, ..greedy() }, &[0], [1.5, 1.0, -1.0], 3), [1, 0, 0]);
    assert_eq!(run(Sampling { presence_penalty: 1.0, ..greedy() }, &[0], [1.5, 1.0, 0.0], 4), [0, 1, 0, 0]);
    assert_eq!(run(Sampling { frequency_penalty: 0.4, ..greedy() }, &[0], [1.5, 1.0, 0.0], 4), [0, 0, 1, 0]);
    let bias = vec![(0, f32::NEG_INFINITY), (2, 5.0)];
    assert_eq!(run(Sampling { logit_bias: bias, ..greedy() }, &[], [1.5, 1.0, 0.0], 1), [2]);
}

#[test]
fn the_same_seed_gives_the_same_draws() {
    let logits = [1.0, 0.9, 0.8, 0.7];
    let draws = |seed| {
        let mut s = sampler(Sampling { seed, ..hot() });
        (0..64).map(|_| s.sample(&mut logits.to_vec(), None).expect("a token").id).collect::<Vec<_>>()
    };
    assert_eq!(draws(Some(3)), draws(Some(3)));
    assert_ne!(draws(Some(3)), draws(Some(4)));
    assert_ne!(draws(None), draws(None));
}

#[test]
fn logprobs_are_of_the_unmodified_distribution() {
    let p = [0.5f32, 0.3, 0.15, 0.05];
    let params = Sampling { logit_bias: vec![(0, f32::NEG_INFINITY)], temperature: 0.0, ..Sampling::default() };
    let mut s = Sampler::new(params, &[], 4, Some(2)).expect("valid");
    let token = s.sample(&mut p.map(f32::ln), None).expect("a token");
    assert_eq!(token.id, 1);
    assert!((token.logprob - 0.3f32.ln()).abs() < 1e-6);
    assert_eq!(token.top.iter().map(|t| t.0).collect::<Vec<_>>(), [0, 1]);
    assert!((token.top[0].1 - 0.5f32.ln()).abs() < 1e-6);
}

#[test]
fn senseless_parameters_are_refused_by_name() {
    let refused = |params| Sampler::new(params, &[], 8, None).err().map(|e| e.field);
    let base = Sampling::default;
    assert_eq!(refused(base()), None);
    assert_eq!(refused(Sampling { temperature: -1.0, ..base() }), Some("temperature"));
    assert_eq!(refused(Sampling { temperature: f32::NAN, ..base() }), Some("temperature"));
    assert_eq!(refused(Sampling { top_p: f32::NAN, ..base() }), Some("top_p"));
    assert_eq!(refused(Sampling { min_p: 1.5, ..base() }), Some("min_p"));
    assert_eq!(refused(Sampling { repeat_penalty: 0.0, ..base() }), Some("repeat_penalty"));
    assert_eq!(refused(Sampling { logit_bias: vec![(8, 1.0)], ..base() }), Some("logit_bias"));
}
