//! Open a model file and look at it without running it: `cargo run --example inspect [MODEL]`.

use std::error::Error;
use std::path::Path;

use host::cli::default_model;
use host::gguf::Gguf;
use host::model::config::Config;

fn main() -> Result<(), Box<dyn Error>> {
    let path = default_model(std::env::args().nth(1).as_deref().map(Path::new))?;
    let gguf = Gguf::open(&path)?;
    let config = Config::from_gguf(&gguf)?;
    println!("{}: {} layers, {} wide", config.arch.name(), config.n_layer, config.n_embd);
    println!("{} tokens of context, {} in the vocabulary", config.n_ctx_train, config.n_vocab);
    for tensor in gguf.tensors().take(5) {
        println!("{} {:?}", tensor.name, tensor.dims());
    }
    Ok(())
}
