//! Finished work kept for requests that begin alike.
//!
//! A tree over pages: a node is one full page, its edge from the parent the page's tokens. A new request walks down
//! from the root as far as its prompt agrees and starts with those pages. Every running sequence enters its pages as
//! they fill, so that requests share a beginning also while both run.
//!
//! Pages alone are enough where every layer is attention. Delta-net layers keep a state instead of a history, so
//! there a walk can only be used down to a node with a *checkpoint*: a slot that holds the state after that page.
//! Checkpoints are taken at the last page border of a prompt, where a prompt leaves a path that others went (the end of
//! a common system prompt), and at the page borders of a reply (a chat continues from there); the least recently
//! used one gives up its slot for a new one.
//!
//! Invariant: who holds a node's page holds the pages of all its ancestors. So a page that only the tree holds has
//! no descendant that a sequence holds, and all such pages can be evicted, leaves first.

use std::collections::HashMap;

use super::pager::Pager;
use crate::backend::PAGE_TOKENS;

/// A node of the tree; never reused, so that a stale one is recognised.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NodeId(u64);

/// Where every walk starts: the empty prefix.
pub const ROOT: NodeId = NodeId(0);

#[derive(Debug)]
struct Node {
    parent: NodeId,
    tokens: Box<[u32]>,
    page: u32,
    children: u32,
    checkpoint: Option<u32>,
    last_used: u64,
}

/// Kept pages and checkpoints.
#[derive(Debug)]
pub struct PrefixCache {
    nodes: HashMap<NodeId, Node>,
    edges: HashMap<(NodeId, Box<[u32]>), NodeId>,
    free_checkpoints: Vec<u32>,
    /// Whether a prefix can only be entered at a checkpoint.
    recurrent: bool,
    next_id: u64,
    clock: u64,
}

/// What of a prompt is there already.
#[derive(Debug, PartialEq, Eq)]
pub struct Found {
    /// The node to go on from.
    pub node: NodeId,
    /// The pages of the usable prefix.
    pub pages: Vec<u32>,
    /// The slot with the recurrent state after the prefix; `None` for models without one or an empty prefix.
    pub checkpoint: Option<u32>,
    /// Pages of the prompt that are kept, usable or not: where other prompts went on differently.
    pub common_pages: u32,
}

impl PrefixCache {
    /// An empty cache. `recurrent` models use the checkpoint slots given.
    pub fn new(recurrent: bool, checkpoint_slots: impl IntoIterator<Item = u32>) -> Self {
        let free_checkpoints = checkpoint_slots.into_iter().collect();
        Self { nodes: HashMap::new(), edges: HashMap::new(), free_checkpoints, recurrent, next_id: 1, clock: 0 }
    }

    /// The longest usable kept beginning of `prompt`, in whole pages, short of its last token: that one has to be
    /// computed for its logits. The pages are not yet shared.
    pub fn find(&mut self, prompt: &[u32]) -> Found {
        self.clock += 1;
        let mut found = Found { node: ROOT, pages: Vec::new(), checkpoint: None, common_pages: 0 };
        let (mut node, mut pages) = (ROOT, Vec::new());
        let whole = prompt.len().saturating_sub(1) / PAGE_TOKENS as usize;
        for tokens in prompt.chunks_exact(PAGE_TOKENS as usize).take(whole) {
            let Some(&next) = self.edges.get(&(node, Box::from(tokens))) else { break };
            let entry = self.nodes.get_mut(&next).expect("an edge leads to a node");
            entry.last_used = self.clock;
            node = next;
            pages.push(entry.page);
            found.common_pages += 1;
            if !self.recurrent || entry.checkpoint.is_some() {
                found.node = node;
                found.checkpoint = entry.checkpoint;
                found.pages.clone_from(&pages);
            }
        }
        found
    }

    /// Enters a sequence's next full page below `parent`. Where the same tokens are kept already in another page, the
    /// sequence is handed that one for its own, to keep the invariant.
    ///
    /// Returns the node, and the page the sequence holds from now on.
    pub fn insert(&mut self, parent: NodeId, tokens: &[u32], page: u32, pager: &mut Pager) -> (NodeId, u32) {
        self.clock += 1;
        let key = (parent, Box::from(tokens));
        if let Some(&node) = self.edges.get(&key) {
            let entry = self.nodes.get_mut(&node).expect("an edge leads to a node");
            entry.last_used = self.clock;
            let kept = entry.page;
            if kept != page {
                pager.share(kept);
                pager.release(page);
            }
            return (node, kept);
        }
        let node = NodeId(self.next_id);
        self.next_id += 1;
        pager.share(page);
        if let Some(parent) = self.nodes.get_mut(&parent) {
            parent.children += 1;
        }
        let tokens = key.1.clone();
        self.edges.insert(key, node);
        let entry = Node { parent, tokens, page, children: 0, checkpoint: None, last_used: self.clock };
        self.nodes.insert(node, entry);
        (node, page)
    }

    /// The slot to write `node`'s checkpoint to; `None` if it has one already or no slot can be had. A sequence that
    /// moves on passes the node of its last checkpoint as `moved_from`, to take that slot along.
    pub fn checkpoint(&mut self, node: NodeId, moved_from: Option<NodeId>) -> Option<u32> {
        if !self.recurrent || self.nodes.get(&node).is_none_or(|n| n.checkpoint.is_some()) {
            return None;
        }
        let moved = moved_from.and_then(|from| self.nodes.get_mut(&from)).and_then(|n| n.checkpoint.take());
        let slot = moved.or_else(|| self.free_checkpoints.pop()).or_else(|| {
            let with = self.nodes.values_mut().filter(|n| n.checkpoint.is_some());
            with.min_by_key(|n| n.last_used).and_then(|n| n.checkpoint.take())
        })?;
        self.nodes.get_mut(&node).expect("looked up above").checkpoint = Some(slot);
        Some(slot)
    }

    /// Takes back a checkpoint that could not be written.
    pub fn drop_checkpoint(&mut self, node: NodeId) {
        if let Some(slot) = self.nodes.get_mut(&node).and_then(|n| n.checkpoint.take()) {
            self.free_checkpoints.push(slot);
        }
    }

    /// Pages that only the cache holds.
    pub fn evictable(&self, pager: &Pager) -> u32 {
        self.nodes.values().filter(|n| pager.holders(n.page) == 1).count() as u32
    }

    /// Frees the least recently used page that only the cache holds. `false`: there is none.
    pub fn evict(&mut self, pager: &mut Pager) -> bool {
        let leaves = self.nodes.iter().filter(|(_, n)| n.children == 0 && pager.holders(n.page) == 1);
        let Some(id) = leaves.min_by_key(|(_, n)| n.last_used).map(|(&id, _)| id) else { return false };
        let node = self.nodes.remove(&id).expect("found above");
        if let Some(parent) = self.nodes.get_mut(&node.parent) {
            parent.children -= 1;
        }
        self.edges.remove(&(node.parent, node.tokens));
        self.free_checkpoints.extend(node.checkpoint);
        pager.release(node.page);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: usize = PAGE_TOKENS as usize;

    /// Enters `tokens` page by page, as a sequence that then ends.
    fn keep(cache: &mut PrefixCache, pager: &mut Pager, tokens: &[u32]) -> Vec<NodeId> {
        let mut node = ROOT;
        let mut nodes = Vec::new();
        for chunk in tokens.chunks_exact(PAGE) {
            assert!(pager.reserve(1, 0));
            let page = pager.take().expect("a free page");
            let (next, page) = cache.insert(node, chunk, page, pager);
            pager.release(page);
            node = next;
            nodes.push(node);
        }
        nodes
    }

    fn tokens(n: usize) -> Vec<u32> {
        (0..n as u32).collect()
    }

    #[test]
    fn whole_pages_short_of_the_last_token_are_found() {
        let (mut cache, mut pager) = (PrefixCache::new(false, []), Pager::new(8));
        keep(&mut cache, &mut pager, &tokens(3 * PAGE));
        for (n, pages) in [(0, 0), (PAGE, 0), (PAGE + 1, 1), (3 * PAGE, 2), (3 * PAGE + 1, 3), (5 * PAGE, 3)] {
            assert_eq!(cache.find(&tokens(n)).pages.len(), pages, "{n} tokens");
        }
        let mut other = tokens(3 * PAGE);
        other[PAGE] = 9999;
        assert_eq!(cache.find(&other).pages.len(), 1);
    }

    #[test]
    fn equal_pages_are_kept_once() {
        let (mut cache, mut pager) = (PrefixCache::new(false, []), Pager::new(8));
        let first = keep(&mut cache, &mut pager, &tokens(2 * PAGE));
        let second = keep(&mut cache, &mut pager, &tokens(2 * PAGE));
        assert_eq!(first, second);
        assert_eq!(pager.n_free(), 6);
    }

    #[test]
    fn eviction_takes_the_oldest_leaf_and_spares_what_is_held() {
        let (mut cache, mut pager) = (PrefixCache::new(false, []), Pager::new(4));
        keep(&mut cache, &mut pager, &tokens(2 * PAGE));
        let mut other = tokens(PAGE);
        other[0] = 77;
        keep(&mut cache, &mut pager, &other);
        cache.find(&tokens(2 * PAGE + 1));
        assert_eq!(cache.evictable(&pager), 3);
        assert!(cache.evict(&mut pager), "`other` was used longest ago");
        assert_eq!(cache.find(&tokens(2 * PAGE + 1)).pages.len(), 2);

        let held = cache.find(&tokens(PAGE + 1)).pages[0];
        pager.share(held);
        assert!(cache.evict(&mut pager));
        assert!(!cache.evict(&mut pager), "the first page is held");
        assert_eq!(cache.find(&tokens(2 * PAGE + 1)).pages, [held]);
    }

    #[test]
    fn a_recurrent_prefix_is_entered_at_a_checkpoint_only() {
        let (mut cache, mut pager) = (PrefixCache::new(true, [10, 11]), Pager::new(8));
        let nodes = keep(&mut cache, &mut pager, &tokens(3 * PAGE));
        let found = cache.find(&tokens(4 * PAGE));
        assert_eq!((found.pages.len(), found.common_pages, found.checkpoint), (0, 3, None));

        let slot = cache.checkpoint(nodes[1], None);
        assert!(slot.is_some());
        assert_eq!(cache.checkpoint(nodes[1], None), None, "it has one");
        let found = cache.find(&tokens(4 * PAGE));
        assert_eq!((found.pages.len(), found.node, found.checkpoint), (2, nodes[1], slot));

        assert_eq!(cache.checkpoint(nodes[2], Some(nodes[1])), slot, "the slot moves along");
        assert_eq!(cache.find(&tokens(3 * PAGE)).checkpoint, None);
    }

    #[test]
    fn the_oldest_checkpoint_gives_way_and_eviction_frees_it() {
        let (mut cache, mut pager) = (PrefixCache::new(true, [10]), Pager::new(8));
        let nodes = keep(&mut cache, &mut pager, &tokens(2 * PAGE));
        assert_eq!(cache.checkpoint(nodes[0], None), Some(10));
        assert_eq!(cache.checkpoint(nodes[1], None), Some(10));
        assert_eq!(cache.find(&tokens(PAGE + 1)).checkpoint, None);
        while cache.evict(&mut pager) {}
        assert_eq!((pager.n_free(), cache.free_checkpoints.as_slice()), (8, &[10][..]));
    }
}
