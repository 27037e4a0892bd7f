//! The page tables of a KV cache: which page holds which positions of which sequence. No memory is touched here.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::compute::PAGE_SIZE;
use crate::error::{RequestError, Result};

/// The pages of some sequences. Sequences share the pages of a common prefix; a sequence that is about to write to a shared page
/// gets a copy of it.
#[derive(Debug)]
pub(super) struct PageTables {
    /// The pages of each sequence, in the order of the positions, in tables of the same length.
    tables: Vec<u32>,
    table_length: usize,
    /// Number of pages of each sequence.
    counts: Vec<usize>,
    /// Number of sequences that hold each page.
    holders: Vec<u32>,
    /// Pages that no sequence holds any more. The last one is taken first.
    returned: Vec<u32>,
    /// Pages that no sequence has held yet.
    fresh: Range<u32>,
}

/// A page that must be copied before the next pass.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct PageCopy {
    pub(super) from: u32,
    pub(super) to: u32,
}

impl PageTables {
    /// Creates empty tables of `table_length` pages each for a number of sequences that share `pages` pages.
    pub(super) fn new([sequences, table_length]: [usize; 2], pages: u32) -> Self {
        Self {
            tables: vec![0; sequences * table_length],
            table_length,
            counts: vec![0; sequences],
            holders: vec![0; pages as usize],
            returned: Vec::new(),
            fresh: 0..pages,
        }
    }

    /// Returns the pages of a sequence.
    pub(super) fn of(&self, sequence: usize) -> &[u32] {
        &self.tables[sequence * self.table_length..][..self.counts[sequence]]
    }

    /// Returns the number of pages that no sequence holds.
    pub(super) fn free(&self) -> usize {
        self.returned.len() + self.fresh.len()
    }

    /// Gives different sequences pages of their own for the positions that they are about to write, which follow those that they have.
    /// Returns the pages to copy before.
    ///
    /// # Errors
    /// Returns an error, and changes nothing, if there are not enough pages.
    pub(super) fn reserve(&mut self, writes: &[(usize, Range<usize>)]) -> Result<Vec<PageCopy>> {
        let missing = |counts: &[usize], (sequence, positions): &(usize, Range<usize>)| {
            positions.end.div_ceil(PAGE_SIZE).saturating_sub(counts[*sequence])
        };
        let mut needed = 0;
        let mut writers = BTreeMap::new();
        for write @ (sequence, positions) in writes {
            needed += missing(&self.counts, write);
            if let Some(page) = self.shared(*sequence, positions.start) {
                *writers.entry(page).or_insert(0) += 1;
            }
        }
        // The last holder of a page keeps it.
        needed += writers
            .into_iter()
            .map(|(page, writers): (u32, u32)| writers.min(self.holders[page as usize] - 1) as usize)
            .sum::<usize>();
        let (free, pages) = (self.free(), self.holders.len());
        if needed > free {
            return Err(RequestError::NoFreePages { needed, free, pages }.into());
        }
        let mut copies = Vec::new();
        for write @ (sequence, positions) in writes {
            let table = sequence * self.table_length;
            if let Some(from) = self.shared(*sequence, positions.start) {
                let to = self.take();
                self.leave(from);
                self.tables[table + positions.start / PAGE_SIZE] = to;
                copies.push(PageCopy { from, to });
            }
            for _ in 0..missing(&self.counts, write) {
                self.tables[table + self.counts[*sequence]] = self.take();
                self.counts[*sequence] += 1;
            }
        }
        Ok(copies)
    }

    /// Removes the pages behind the first `length` positions.
    pub(super) fn truncate(&mut self, sequence: usize, length: usize) {
        // In this order the next sequence takes them in the order of the positions.
        while self.counts[sequence] > length.div_ceil(PAGE_SIZE) {
            self.counts[sequence] -= 1;
            self.leave(self.tables[sequence * self.table_length + self.counts[sequence]]);
        }
    }

    /// Replaces the pages of `to` by those with the first `length` positions of `from`, which both then share.
    pub(super) fn share(&mut self, from: usize, to: usize, length: usize) {
        let (pages, length) = (from * self.table_length, length.div_ceil(PAGE_SIZE));
        let shared = pages..pages + length;
        // First, so that no page is free in between.
        self.tables[shared.clone()].iter().for_each(|page| self.holders[*page as usize] += 1);
        self.truncate(to, 0);
        self.tables.copy_within(shared, to * self.table_length);
        self.counts[to] = length;
    }

    /// Returns the page with this position if the sequence has it and shares it.
    fn shared(&self, sequence: usize, position: usize) -> Option<u32> {
        let page = *self.of(sequence).get(position / PAGE_SIZE)?;
        (self.holders[page as usize] > 1).then_some(page)
    }

    /// Takes a free page; the caller has counted them.
    fn take(&mut self) -> u32 {
        let page =
            self.returned.pop().or_else(|| self.fresh.next()).expect("the free pages have been counted");
        self.holders[page as usize] = 1;
        page
    }

    fn leave(&mut self, page: u32) {
        let holders = &mut self.holders[page as usize];
        *holders -= 1;
        if *holders == 0 {
            self.returned.push(page);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::error::Error;

    const SEQUENCES: usize = 4;
    const PAGES: u32 = 12;

    #[derive(Clone, Debug)]
    enum Step {
        /// Appends tokens to some sequences in one pass.
        Append([usize; SEQUENCES]),
        Truncate(usize, usize),
        Fork(usize, usize, usize),
    }

    fn step() -> impl Strategy<Value = Step> {
        let tokens = prop_oneof![Just(0), Just(1), 1..3 * PAGE_SIZE];
        let sequence = 0..SEQUENCES;
        prop_oneof![
            4 => prop::array::uniform4(tokens).prop_map(Step::Append),
            1 => (sequence.clone(), 0..4 * PAGE_SIZE).prop_map(|(of, length)| Step::Truncate(of, length)),
            2 => (sequence.clone(), sequence, 0..4 * PAGE_SIZE)
                .prop_map(|(from, to, length)| Step::Fork(from, to, length)),
        ]
    }

    /// A cache whose content is the text that wrote it.
    struct Model {
        tables: PageTables,
        memory: Vec<u64>,
        texts: [Vec<u64>; SEQUENCES],
        next: u64,
    }

    impl Model {
        fn append(&mut self, more: [usize; SEQUENCES]) {
            let mut writes = Vec::new();
            for (sequence, (text, more)) in
                self.texts.iter().zip(more).enumerate().filter(|(_, (_, more))| *more > 0)
            {
                writes.push((sequence, text.len()..text.len() + more));
            }
            let needed = self.needed(&writes);
            let before = [0, 1, 2, 3].map(|sequence| self.tables.of(sequence).to_vec());
            let free = self.tables.free();
            let copies = match self.tables.reserve(&writes) {
                Ok(copies) => {
                    assert_eq!(free - self.tables.free(), needed);
                    copies
                }
                Err(Error::Request(error)) => {
                    assert!(needed > free);
                    assert_eq!(error, RequestError::NoFreePages { needed, free, pages: PAGES as usize });
                    assert_eq!(before, [0, 1, 2, 3].map(|sequence| self.tables.of(sequence).to_vec()));
                    return;
                }
                Err(other) => panic!("{other}"),
            };
            for PageCopy { from, to } in copies {
                let from = from as usize * PAGE_SIZE;
                self.memory.copy_within(from..from + PAGE_SIZE, to as usize * PAGE_SIZE);
            }
            for (sequence, positions) in writes {
                for position in positions {
                    let page = self.tables.of(sequence)[position / PAGE_SIZE] as usize;
                    self.memory[page * PAGE_SIZE + position % PAGE_SIZE] = self.next;
                    self.texts[sequence].push(self.next);
                    self.next += 1;
                }
            }
        }

        /// Counts the pages that writes need, one sequence after the other.
        fn needed(&self, writes: &[(usize, Range<usize>)]) -> usize {
            let mut holders = self.tables.holders.clone();
            let mut needed = 0;
            for (sequence, Range { start, end }) in writes {
                needed += end.div_ceil(PAGE_SIZE) - start.div_ceil(PAGE_SIZE);
                if start % PAGE_SIZE > 0 {
                    let holders = &mut holders[self.tables.of(*sequence)[start / PAGE_SIZE] as usize];
                    if *holders > 1 {
                        *holders -= 1;
                        needed += 1;
                    }
                }
            }
            needed
        }

        fn check(&self) {
            let mut holders = vec![0; PAGES as usize];
            for (sequence, text) in self.texts.iter().enumerate() {
                let pages = self.tables.of(sequence);
                assert_eq!(pages.len(), text.len().div_ceil(PAGE_SIZE));
                for page in pages {
                    holders[*page as usize] += 1;
                }
                for (position, value) in text.iter().enumerate() {
                    let page = pages[position / PAGE_SIZE] as usize;
                    assert_eq!(
                        self.memory[page * PAGE_SIZE + position % PAGE_SIZE],
                        *value,
                        "{sequence}, {position}"
                    );
                }
            }
            assert_eq!(holders, self.tables.holders);
            let mut free: Vec<u32> =
                self.tables.returned.iter().copied().chain(self.tables.fresh.clone()).collect();
            free.sort_unstable();
            let unheld: Vec<u32> = (0..PAGES).filter(|page| holders[*page as usize] == 0).collect();
            assert_eq!(free, unheld);
        }
    }

    proptest! {
        #[test]
        fn every_sequence_keeps_what_it_wrote_and_no_page_is_lost(steps in prop::collection::vec(step(), 1..60)) {
            let mut model = Model {
                tables: PageTables::new([SEQUENCES, PAGES as usize], PAGES),
                memory: vec![u64::MAX; PAGES as usize * PAGE_SIZE],
                texts: Default::default(),
                next: 0,
            };
            for step in steps {
                match step {
                    Step::Append(more) => model.append(more),
                    Step::Truncate(sequence, length) => {
                        model.texts[sequence].truncate(length);
                        model.tables.truncate(sequence, model.texts[sequence].len());
                    }
                    Step::Fork(from, to, length) if from != to => {
                        let length = length.min(model.texts[from].len());
                        model.tables.share(from, to, length);
                        model.texts[to] = model.texts[from][..length].to_vec();
                    }
                    Step::Fork(..) => {}
                }
                model.check();
            }
        }
    }

    #[test]
    fn sequences_that_leave_a_shared_page_at_once_need_one_page_less_than_they_are() {
        let mut tables = PageTables::new([3, 3], 3);
        tables.reserve(&[(0, 0..10)]).unwrap();
        tables.share(0, 1, 10);
        tables.share(0, 2, 10);
        assert_eq!(tables.free(), 2);
        let writes = [0, 1, 2].map(|sequence| (sequence, 10..11));
        assert_eq!(tables.reserve(&writes).unwrap().len(), 2);
        assert_eq!(tables.free(), 0);
    }
}
