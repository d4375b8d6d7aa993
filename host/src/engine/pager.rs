//! Physical pages of the KV cache: who holds which, and who may still ask for how many.
//!
//! A page holds [`PAGE_TOKENS`](crate::backend::PAGE_TOKENS) positions of every layer with attention. Sequences take
//! pages as they grow, and several may hold the same page (a common beginning). A running sequence must never die for
//! lack of a page, and is never preempted: it is admitted only when all pages that it could come to need are free or
//! can be freed, and these are *reserved* until it takes them. Requests wait in the queue instead.

/// Page bookkeeping. Pages are numbers below the count given at the start; the data is elsewhere.
#[derive(Debug)]
pub struct Pager {
    free: Vec<u32>,
    /// Holders of each page.
    refs: Vec<u32>,
    /// Pages that admitted sequences have a right to and have not taken yet.
    reserved: u32,
}

impl Pager {
    /// `n_pages` free pages.
    pub fn new(n_pages: u32) -> Self {
        // Reversed, so that page 0 is taken first.
        Self { free: (0..n_pages).rev().collect(), refs: vec![0; n_pages as usize], reserved: 0 }
    }

    /// Pages that nobody holds.
    pub fn n_free(&self) -> u32 {
        self.free.len() as u32
    }

    /// All pages.
    pub fn n_pages(&self) -> u32 {
        self.refs.len() as u32
    }

    /// Reserved pages.
    pub fn n_reserved(&self) -> u32 {
        self.reserved
    }

    /// Holders of a page.
    pub fn holders(&self, page: u32) -> u32 {
        self.refs[page as usize]
    }

    /// Reserves `n` pages if, next to those reserved already, so many are free or among the `evictable` ones.
    pub fn reserve(&mut self, n: u32, evictable: u32) -> bool {
        let ok = u64::from(self.reserved) + u64::from(n) <= u64::from(self.n_free()) + u64::from(evictable);
        if ok {
            self.reserved += n;
        }
        ok
    }

    /// Gives back a right to `n` pages.
    pub fn unreserve(&mut self, n: u32) {
        debug_assert!(n <= self.reserved);
        self.reserved = self.reserved.saturating_sub(n);
    }

    /// Takes a reserved page. `None`: no page is free, and the caller has to evict one first.
    pub fn take(&mut self) -> Option<u32> {
        let page = self.free.pop()?;
        self.refs[page as usize] = 1;
        self.unreserve(1);
        Some(page)
    }

    /// One more holder of a page that is held already.
    pub fn share(&mut self, page: u32) {
        debug_assert!(self.refs[page as usize] > 0, "page {page} is free");
        self.refs[page as usize] += 1;
    }

    /// One holder less; the last one frees the page.
    pub fn release(&mut self, page: u32) {
        let refs = &mut self.refs[page as usize];
        debug_assert!(*refs > 0, "page {page} is free already");
        *refs = refs.saturating_sub(1);
        if *refs == 0 {
            self.free.push(page);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_free_when_its_last_holder_lets_go() {
        let mut pager = Pager::new(2);
        assert!(pager.reserve(2, 0));
        let a = pager.take().expect("a page");
        pager.share(a);
        pager.release(a);
        assert_eq!((pager.n_free(), pager.holders(a)), (1, 1));
        pager.release(a);
        assert_eq!((pager.n_free(), pager.n_reserved()), (2, 1));
    }

    #[test]
    fn reservations_never_exceed_what_can_be_had() {
        let mut pager = Pager::new(4);
        assert!(pager.reserve(3, 0));
        assert!(!pager.reserve(2, 0), "one page is left");
        assert!(pager.reserve(2, 1), "one of the held pages could be evicted");
        assert!(!pager.reserve(u32::MAX, 0));
        pager.unreserve(5);
        assert!(pager.reserve(4, 0));
    }
}
