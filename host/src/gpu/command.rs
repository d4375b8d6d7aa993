//! Steps in flight: the host prepares the next while the device runs the last.

use std::collections::VecDeque;

use super::device::{Device, Result};

/// A step that was committed. Tickets of one ring are ordered by age.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(u64);

/// The committed steps that may still run, oldest first, at most `depth` of them.
pub struct Ring<D: Device> {
    in_flight: VecDeque<(Ticket, D::Event)>,
    depth: usize,
    next: u64,
}

impl<D: Device> Ring<D> {
    /// A ring of `depth` steps, at least one.
    pub fn new(depth: usize) -> Self {
        let depth = depth.max(1);
        Ring { in_flight: VecDeque::with_capacity(depth), depth, next: 0 }
    }

    /// Ends a step: everything queued so far belongs to it or to an older one. Waits for the oldest
    /// step where the ring is full.
    ///
    /// # Errors
    /// The device's.
    pub fn commit_async(&mut self, device: &D) -> Result<Ticket> {
        while self.in_flight.len() >= self.depth {
            if let Some((_, event)) = self.in_flight.pop_front() {
                device.wait(&event)?;
            }
        }
        let ticket = Ticket(self.next);
        self.in_flight.push_back((ticket, device.record()?));
        self.next += 1;
        Ok(ticket)
    }

    /// Ends a step and waits for it.
    ///
    /// # Errors
    /// The device's.
    pub fn commit_and_wait(&mut self, device: &D) -> Result<()> {
        let ticket = self.commit_async(device)?;
        self.wait(device, ticket)
    }

    /// Waits for a step. Older steps are done then as well.
    ///
    /// # Errors
    /// The device's; the step then counts as ended.
    pub fn wait(&mut self, device: &D, ticket: Ticket) -> Result<()> {
        // One stream runs the steps in order, so the youngest event of them settles all.
        let n_done = self.in_flight.iter().take_while(|(other, _)| *other <= ticket).count();
        match self.in_flight.drain(..n_done).next_back() {
            Some((_, event)) => device.wait(&event),
            None => Ok(()),
        }
    }

    /// Forgets the steps that are done, without waiting, and returns how many are in flight.
    ///
    /// # Errors
    /// The device's.
    pub fn release_completed(&mut self, device: &D) -> Result<usize> {
        while let Some((_, event)) = self.in_flight.front() {
            if !device.is_done(event)? {
                break;
            }
            self.in_flight.pop_front();
        }
        Ok(self.in_flight.len())
    }

    /// Whether a step has ended, as far as [`Ring::wait`] and [`Ring::release_completed`] have seen.
    pub fn is_released(&self, ticket: Ticket) -> bool {
        ticket.0 < self.next && self.in_flight.front().is_none_or(|(oldest, _)| ticket < *oldest)
    }
}
