//! A source of full plans whose state changes meanwhile.

use std::cell::RefCell;

use headgate_core::{Dirty, NodeFacts, State, StateSource};

use crate::changes::Event;

/// The number of reads before the change, the state, and what changed.
type Inner = (Option<usize>, State, NodeFacts, Dirty);

/// A source whose state changes after it was read a number of times.
pub(crate) struct Changing<'a> {
    inner: RefCell<Inner>,
    events: &'a [Event],
}

impl<'a> Changing<'a> {
    pub(crate) fn new(reads: usize, state: State, node: NodeFacts, events: &'a [Event]) -> Self {
        Self { inner: RefCell::new((Some(reads), state, node, Dirty::default())), events }
    }

    /// Makes the change, if it has not happened, and returns the state and what changed.
    pub(crate) fn end(self) -> (State, NodeFacts, Dirty) {
        while self.inner.borrow().0.is_some() {
            self.look(&mut |_, _, _| {});
        }
        let (_, state, node, dirty) = self.inner.into_inner();
        (state, node, dirty)
    }
}

impl StateSource for Changing<'_> {
    fn look(&self, read: &mut dyn FnMut(&State, &NodeFacts, &Dirty)) {
        let mut inner = self.inner.borrow_mut();
        let (reads, state, node, dirty) = &mut *inner;
        match reads {
            Some(0) => {
                self.events.iter().for_each(|event| event.apply(state, node, dirty));
                *reads = None;
            }
            Some(left) => *left -= 1,
            None => {}
        }
        read(state, node, dirty);
    }
}
