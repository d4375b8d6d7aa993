//! What can go wrong in an emulated launch.

use core::panic::Location;
use std::fmt;

/// A fault of a kernel: where, and what.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{kernel}: block {block:?}, thread {thread:?}{}: {what}", At(*at))]
pub struct Fault {
    /// The kernel's name.
    pub kernel: &'static str,
    /// `block_idx` in x, y, z.
    pub block: [u32; 3],
    /// `thread_idx` in x, y, z.
    pub thread: [u32; 3],
    /// The line of the kernel, where one is to blame.
    pub at: Option<&'static Location<'static>>,
    /// What happened.
    pub what: What,
}

struct At(Option<&'static Location<'static>>);

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(at) => write!(f, ", {at}"),
            None => Ok(()),
        }
    }
}

/// A way to touch memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// A load.
    Read,
    /// A store.
    Write,
    /// A read-modify-write.
    Atomic,
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Atomic => "atomic",
        })
    }
}

/// One of the device's memories.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Space {
    /// Buffers of the device.
    Global,
    /// The block's dynamic shared memory; addresses are offsets into it.
    Shared,
}

impl fmt::Display for Space {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Global => "global memory",
            Self::Shared => "shared memory",
        })
    }
}

/// The kinds of fault.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum What {
    /// The bytes are not all inside of one allocation, or of the block's shared memory.
    #[error("{access} of {bytes} bytes out of bounds in {space} at {address:#x}: {nearest}")]
    OutOfBounds {
        /// The memory.
        space: Space,
        /// Load, store or atomic.
        access: Access,
        /// Where it begins.
        address: usize,
        /// How long it is.
        bytes: usize,
        /// The nearest thing that is there, in words.
        nearest: String,
    },
    /// The address is not a multiple of the type's alignment.
    #[error("misaligned {access} in {space} at {address:#x}, which is no multiple of {align}")]
    Misaligned {
        /// The memory.
        space: Space,
        /// Load, store or atomic.
        access: Access,
        /// Where it begins.
        address: usize,
        /// What it should be a multiple of.
        align: usize,
    },
    /// A byte that nobody has written was read.
    #[error("read of {space} at {address:#x}, which was never written")]
    Uninitialised {
        /// The memory.
        space: Space,
        /// The first such byte.
        address: usize,
    },
    /// A product of a warpgroup read shared memory that its writer has not fenced for it.
    #[error(
        "asynchronous read of shared memory at offset {offset:#x}, which thread {writer} (counted in the block) has \
         written and not fenced"
    )]
    NotFenced {
        /// Offset of the byte.
        offset: usize,
        /// Who wrote it.
        writer: u32,
    },
    /// Two lanes at one byte of shared memory, at least one of them writing, and no barrier between.
    #[error(
        "race in shared memory at offset {offset:#x}: {access} here, {other_access} by thread {other} \
         (counted in the block), and no barrier between"
    )]
    Race {
        /// Offset of the byte.
        offset: usize,
        /// What this lane did.
        access: Access,
        /// What the other did.
        other_access: Access,
        /// The other lane, or one of several.
        other: u32,
    },
    /// Some lanes wait at the block's barrier and others never come.
    #[error("divergent barrier: waits for thread {missing} (counted in the block), which {doing}")]
    DivergentBarrier {
        /// A lane that is not there.
        missing: u32,
        /// Where it is instead.
        doing: String,
    },
    /// A lane takes part in a collective, but another one of its mask never does.
    #[error("divergent {collective}: waits for lane {missing} of its warp, which {doing}")]
    DivergentWarp {
        /// The collective.
        collective: &'static str,
        /// A lane that is not there.
        missing: u32,
        /// Where it is instead.
        doing: String,
    },
    /// A collective names a lane that has exited, or that the block does not have.
    #[error("{collective} names lane {exited} of its warp, which has exited")]
    ExitedLane {
        /// The collective.
        collective: &'static str,
        /// The lane.
        exited: u32,
    },
    /// A collective whose mask leaves out the calling lane, or the lane that a shuffle reads from.
    #[error("{collective} with mask {mask:#010x}, which leaves out lane {lane}")]
    OutsideMask {
        /// The collective.
        collective: &'static str,
        /// Its mask.
        mask: u32,
        /// The lane left out.
        lane: u32,
    },
    /// All lanes that could run poll memory, and nothing has changed for a long time.
    #[error("the block polls memory for ever")]
    Stuck,
    /// The kernel panicked; on a GPU it would trap.
    #[error("panic: {0}")]
    Panic(String),
    /// The launch shape is one that no GPU accepts.
    #[error("invalid launch: {0}")]
    Launch(String),
}

/// How a lane's fault travels from the access to the scheduler: as the payload of an unwind that runs no
/// panic hook.
pub(super) struct Unwind {
    pub(super) at: Option<&'static Location<'static>>,
    pub(super) what: What,
}

/// Ends the running lane.
#[cold]
pub(super) fn raise(at: &'static Location<'static>, what: What) -> ! {
    std::panic::resume_unwind(Box::new(Unwind { at: Some(at), what }))
}
