//! The suite of every backend, on those that need no GPU.

use ryzanstein_config::BackendChoice;
use ryzanstein_tests::conformance::{conform, conform_on, conform_with};
use ryzanstein_tests::{encrypted, sockets};

mod tcp {
    use super::*;

    #[test]
    fn one_rank_does_everything_alone() {
        conform(BackendChoice::Tcp, 1);
    }

    #[test]
    fn two_ranks() {
        conform(BackendChoice::Tcp, 2);
    }

    #[test]
    fn three_ranks() {
        conform(BackendChoice::Tcp, 3);
    }

    #[test]
    fn four_ranks() {
        conform(BackendChoice::Tcp, 4);
    }

    #[test]
    fn five_ranks() {
        conform(BackendChoice::Tcp, 5);
    }

    #[test]
    fn eight_ranks() {
        conform(BackendChoice::Tcp, 8);
    }
}

mod tcp_on_hosts {
    use super::*;

    #[test]
    fn two_hosts_with_two_ranks_each() {
        conform_on(&["a", "a", "b", "b"]);
    }

    #[test]
    fn three_hosts_of_which_one_has_three_ranks_and_another_one() {
        conform_on(&["a", "b", "a", "c", "a", "b"]);
    }
}

mod tcp_on_sockets {
    use super::*;

    #[test]
    fn two_ranks() {
        conform_with(&sockets(), 2);
    }

    #[test]
    fn three_ranks() {
        conform_with(&sockets(), 3);
    }

    #[test]
    fn five_ranks() {
        conform_with(&sockets(), 5);
    }
}

mod tcp_encrypted {
    use super::*;

    #[test]
    fn two_ranks() {
        conform_with(&encrypted(), 2);
    }

    #[test]
    fn three_ranks() {
        conform_with(&encrypted(), 3);
    }

    #[test]
    fn four_ranks() {
        conform_with(&encrypted(), 4);
    }
}
