//! The suite of every backend, on those that need no GPU.

use ryzanstein_config::BackendChoice;
use ryzanstein_tests::conformance::{conform, conform_on, conform_with};
use ryzanstein_tests::{encrypted, sockets};

macro_rules! suite {
    ($backend:ident, $choice:expr) => {
        mod $backend {
            use super::*;

            #[test]
            fn one_rank_does_everything_alone() {
                conform($choice, 1);
            }

            #[test]
            fn two_ranks() {
                conform($choice, 2);
            }

            #[test]
            fn three_ranks() {
                conform($choice, 3);
            }

            #[test]
            fn four_ranks() {
                conform($choice, 4);
            }

            #[test]
            fn five_ranks() {
                conform($choice, 5);
            }

            #[test]
            fn eight_ranks() {
                conform($choice, 8);
            }
        }
    };
}
suite!(tcp, BackendChoice::Tcp);

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
