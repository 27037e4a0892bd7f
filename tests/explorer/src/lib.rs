//! Visits every state of a small world: model checking for tests.
//!
//! A test describes a [`World`]: the pure core it checks, what surrounds it (processes, messages on their way, the clock), and
//! the steps that can come next. [`explore`] takes every step in every state, breadth first, so the first counterexample is a
//! shortest one. Two states with the same identity are one.
//!
//! Liveness comes from the shape of the graph. Each state without a next step must be an end, and no sequence of steps may
//! return to a state it has passed. So every run of the world ends, and ends well.

use std::collections::hash_map::{DefaultHasher, Entry};
use std::collections::{HashMap, VecDeque};
use std::fmt::{self, Debug, Write as _};
use std::hash::Hasher;

/// Something with states and steps between them.
pub trait World: Clone {
    /// A possible step.
    type Step: Debug;

    /// Writes everything that tells this state from others. 64 bits remain of it.
    fn identify(&self, identity: &mut impl Hasher);

    /// Returns the possible next steps. Steps that change nothing do not belong here: they lead back to where they began.
    fn steps(&self) -> Vec<Self::Step>;

    /// Lets it happen.
    ///
    /// # Errors
    /// The property that is broken now.
    fn take(&mut self, step: &Self::Step) -> Result<(), String>;

    /// Looks at a state without a next step.
    ///
    /// # Errors
    /// Who waits for ever, and for what.
    fn end(&self) -> Result<(), String>;
}

/// Counts of visited states and steps.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Visited {
    /// Different states.
    pub states: usize,
    /// Steps taken.
    pub steps: usize,
    /// States without a next step.
    pub ends: usize,
    /// Steps to the farthest state.
    pub depth: usize,
}

impl fmt::Display for Visited {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { states, steps, ends, depth } = self;
        write!(f, "{states} states, {steps} steps, {ends} ends, at most {depth} steps deep")
    }
}

/// A broken property, with a shortest way there.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Counterexample {
    /// The violation.
    pub why: String,
    /// The steps that lead there.
    pub trace: Vec<String>,
}

impl fmt::Display for Counterexample {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, after", self.why)?;
        self.trace.iter().enumerate().try_for_each(|(index, step)| write!(f, "\n{:4}. {step}", index + 1))
    }
}

/// Visits all states that `start` leads to.
///
/// # Errors
/// The first property found broken; or that there are more than `most` states.
pub fn explore<W: World>(start: W, most: usize) -> Result<Visited, Counterexample> {
    let mut graph = Graph::<W::Step>::default();
    graph.add(identity(&start), None);
    let mut visited = Visited { states: 1, steps: 0, ends: 0, depth: 0 };
    let mut frontier = VecDeque::from([(0, 0, start)]);
    while let Some((node, depth, world)) = frontier.pop_front() {
        visited.depth = depth;
        let steps = world.steps();
        if steps.is_empty() {
            visited.ends += 1;
            world.end().map_err(|why| graph.counterexample(node, None, why))?;
        }
        for step in steps {
            let mut next = world.clone();
            next.take(&step).map_err(|why| graph.counterexample(node, Some(&step), why))?;
            visited.steps += 1;
            let (to, is_new) = graph.add(identity(&next), Some((node, step)));
            if is_new {
                visited.states += 1;
                frontier.push_back((to, depth + 1, next));
            }
            if visited.states > most {
                return Err(graph.counterexample(to, None, format!("there are more than {most} states")));
            }
        }
    }
    match graph.cycle() {
        None => Ok(visited),
        Some(node) => Err(graph.counterexample(node, None, "it can go round in circles".into())),
    }
}

/// Writes what `Debug` shows, without keeping it.
pub fn identify_by_debug(value: &impl Debug, identity: &mut impl Hasher) {
    struct Sink<'a, H>(&'a mut H);
    impl<H: Hasher> fmt::Write for Sink<'_, H> {
        fn write_str(&mut self, text: &str) -> fmt::Result {
            self.0.write(text.as_bytes());
            Ok(())
        }
    }
    // The sink takes everything; a value that cannot be shown is as good as one that shows nothing.
    let _ = write!(Sink(identity), "{value:?}");
}

fn identity(world: &impl World) -> u64 {
    // Always the same key, so that a run can be repeated.
    let mut hasher = DefaultHasher::new();
    world.identify(&mut hasher);
    hasher.finish()
}

struct Graph<S> {
    numbers: HashMap<u64, u32>,
    /// The first edge to each node.
    origins: Vec<Option<(u32, S)>>,
    edges: Vec<(u32, u32)>,
}

impl<S> Default for Graph<S> {
    fn default() -> Self {
        Self { numbers: HashMap::new(), origins: Vec::new(), edges: Vec::new() }
    }
}

impl<S: Debug> Graph<S> {
    /// The node's number, and whether it is new.
    fn add(&mut self, identity: u64, origin: Option<(u32, S)>) -> (u32, bool) {
        let new = self.origins.len() as u32;
        let (node, is_new) = match self.numbers.entry(identity) {
            Entry::Occupied(known) => (*known.get(), false),
            Entry::Vacant(vacant) => (*vacant.insert(new), true),
        };
        self.edges.extend(origin.iter().map(|(from, _)| (*from, node)));
        if is_new {
            self.origins.push(origin);
        }
        (node, is_new)
    }

    fn counterexample(&self, node: u32, last: Option<&S>, why: String) -> Counterexample {
        let mut trace: Vec<String> = last.iter().map(|step| format!("{step:?}")).collect();
        let mut node = node;
        while let Some((from, step)) = &self.origins[node as usize] {
            trace.push(format!("{step:?}"));
            node = *from;
        }
        trace.reverse();
        Counterexample { why, trace }
    }

    /// The first node on a cycle, or behind one.
    fn cycle(&self) -> Option<u32> {
        let nodes = self.origins.len();
        let mut incoming = vec![0_u32; nodes];
        let mut outgoing = vec![Vec::new(); nodes];
        for (from, to) in &self.edges {
            incoming[*to as usize] += 1;
            outgoing[*from as usize].push(*to);
        }
        // Takes away, again and again, what nothing leads to.
        let mut free: Vec<u32> = (0..nodes as u32).filter(|node| incoming[*node as usize] == 0).collect();
        while let Some(node) = free.pop() {
            for to in &outgoing[node as usize] {
                incoming[*to as usize] -= 1;
                if incoming[*to as usize] == 0 {
                    free.push(*to);
                }
            }
        }
        (0..nodes as u32).find(|node| incoming[*node as usize] > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A number that grows by one or two up to a limit, with three flaws to choose from.
    #[derive(Clone)]
    struct Counter {
        value: u32,
        /// Not to be come to.
        forbidden: u32,
        /// No step leads away from here.
        stuck: u32,
        /// A step back leads away from here.
        back: u32,
    }

    const FLAWLESS: Counter = Counter { value: 0, forbidden: 99, stuck: 99, back: 99 };

    impl World for Counter {
        type Step = i32;

        fn identify(&self, identity: &mut impl Hasher) {
            identity.write_u32(self.value);
        }

        fn steps(&self) -> Vec<i32> {
            match self.value {
                value if value == self.stuck || value >= 10 => Vec::new(),
                value if value == self.back => vec![1, -1],
                _ => vec![1, 2],
            }
        }

        fn take(&mut self, step: &i32) -> Result<(), String> {
            self.value = self.value.saturating_add_signed(*step);
            if self.value == self.forbidden { Err(format!("it is {}", self.value)) } else { Ok(()) }
        }

        fn end(&self) -> Result<(), String> {
            if self.value >= 10 { Ok(()) } else { Err(format!("it stays {}", self.value)) }
        }
    }

    #[test]
    fn every_state_is_visited_once() {
        let visited = explore(FLAWLESS, 100).unwrap();
        assert_eq!(visited, Visited { states: 12, steps: 20, ends: 2, depth: 6 });
    }

    #[test]
    fn a_broken_property_comes_with_the_shortest_trace() {
        let found = explore(Counter { forbidden: 5, ..FLAWLESS }, 100).unwrap_err();
        assert_eq!((found.why.as_str(), found.trace.len()), ("it is 5", 3));
    }

    #[test]
    fn a_state_without_a_way_out_that_is_no_end_is_found() {
        let found = explore(Counter { stuck: 4, ..FLAWLESS }, 100).unwrap_err();
        assert_eq!((found.why.as_str(), found.trace), ("it stays 4", vec!["2".into(), "2".into()]));
    }

    #[test]
    fn a_circle_is_found_and_so_is_a_world_that_is_too_large() {
        let found = explore(Counter { back: 6, ..FLAWLESS }, 100).unwrap_err();
        assert_eq!((found.why.as_str(), found.trace.len()), ("it can go round in circles", 3));
        assert!(explore(FLAWLESS, 5).unwrap_err().why.contains("more than 5 states"));
    }
}
