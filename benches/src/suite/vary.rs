//! The variants that `--vary` compares, and how each is started. Pure.

use ryzanstein_process_group::paths::Algorithm;
use ryzanstein_process_group::{BackendKind, Error};

/// Number of rounds in which the variants take turns, so that a drift of the machine affects all alike.
pub const ROUNDS: usize = 3;

/// The property in which the variants of a measurement differ.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Vary {
    /// NCCL's algorithms and our own kernels, or the paths over CPUs.
    Algorithm,
    /// NCCL's protocol.
    Protocol,
    /// The backend.
    Backend,
    /// Copies between peers, or through memory or links between them.
    Copies,
    /// The state that each call starts from.
    Start,
}

/// The state that a call starts from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Start {
    /// An existing group.
    Reuse,
    /// A group that is made for the call.
    NewGroup,
    /// A rank that joins for the call, and leaves after it.
    Initialize,
}

impl Start {
    /// All starts, the cheapest first.
    pub const ALL: [Self; 3] = [Self::Reuse, Self::NewGroup, Self::Initialize];

    /// Returns the name of the variant.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Reuse => "reuse",
            Self::NewGroup => "new_group",
            Self::Initialize => "initialize",
        }
    }
}

/// One of the compared variants. Its ranks are separate processes, because NCCL reads its variables once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Variant {
    /// The name in tables and rows.
    pub name: &'static str,
    /// Environment variables of its ranks.
    pub variables: &'static [(&'static str, &'static str)],
    /// The path that its calls are forced to take.
    pub path: Option<&'static str>,
    /// The state that its calls start from, if that is varied.
    pub start: Option<Start>,
}

impl Variant {
    const fn plain(name: &'static str) -> Self {
        Self { name, variables: &[], path: None, start: None }
    }

    const fn set(name: &'static str, variables: &'static [(&'static str, &'static str)]) -> Self {
        Self { variables, ..Self::plain(name) }
    }

    /// Creates a variant that uses NCCL, and not our own kernels.
    const fn nccl(name: &'static str, variables: &'static [(&'static str, &'static str)]) -> Self {
        Self { variables, ..Self::forced(name, "nccl") }
    }

    const fn forced(name: &'static str, path: &'static str) -> Self {
        Self { path: Some(path), ..Self::plain(name) }
    }

    /// Describes the difference of the variant, for a legend.
    pub fn legend(&self) -> String {
        let path = self.path.map(|path| format!("--path {path}"));
        let variables = self.variables.iter().map(|(name, value)| format!("{name}={value}"));
        let all: Vec<String> = variables.chain(path).collect();
        let told = match (self.start, all.is_empty()) {
            (Some(Start::Reuse), _) => "a call in a group that is there".into(),
            (Some(Start::NewGroup), _) => "a new group for each call, and the call".into(),
            (Some(Start::Initialize), _) => "initialize, the call and finalize".into(),
            (None, true) => "nothing is set".into(),
            (None, false) => all.join(" "),
        };
        format!("{}: {told}", self.name)
    }
}

impl Vary {
    /// Returns the value of the flag.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Algorithm => "algorithm",
            Self::Protocol => "protocol",
            Self::Backend => "backend",
            Self::Copies => "copies",
            Self::Start => "start",
        }
    }

    /// Returns the variants on a backend; the first is the one that the others are compared with. `gpus` are those of this
    /// machine.
    ///
    /// # Errors
    /// [`Error::Configuration`] if there is nothing to compare.
    pub fn variants(self, backend: BackendKind, ranks: usize, gpus: usize) -> Result<Vec<Variant>, Error> {
        let on_nccl = backend == BackendKind::Nccl;
        match self {
            Self::Algorithm if on_nccl => Ok(vec![
                Variant::nccl("nccl", &[]),
                Variant::nccl("RING", &[("NCCL_ALGO", "Ring")]),
                // The other operations have no tree algorithm.
                Variant::nccl("TREE", &[("NCCL_ALGO", "Ring;allreduce:Tree")]),
                Variant::forced("one_shot", "peer/one_shot"),
                Variant::forced("two_shot", "peer/two_shot"),
            ]),
            Self::Algorithm => {
                // The ranks of a variant are on one host, which has no two levels.
                let each =
                    Algorithm::ALL.into_iter().filter(|algorithm| *algorithm != Algorithm::Hierarchical);
                // Over any links.
                let each = each.map(|algorithm| Variant::forced(algorithm.name(), algorithm.name()));
                Ok([Variant::plain("auto")].into_iter().chain(each).collect())
            }
            Self::Protocol if on_nccl => Ok(vec![
                Variant::nccl("auto", &[]),
                Variant::nccl("LL", &[("NCCL_PROTO", "LL")]),
                Variant::nccl("LL128", &[("NCCL_PROTO", "LL128")]),
                Variant::nccl("Simple", &[("NCCL_PROTO", "Simple")]),
            ]),
            Self::Protocol => Err(Error::Configuration(format!(
                "--vary protocol: the protocols LL, LL128 and Simple are NCCL's, and the {backend} backend on CPUs has none; run \
                 it on GPUs with --backend nccl, or use --vary algorithm"
            ))),
            Self::Backend if gpus < ranks.max(1) => Err(Error::Configuration(format!(
                "--vary backend: it compares nccl with tcp, and nccl needs a GPU for each rank: CUDA shows {gpus} here for \
                 {ranks} ranks; `ryz doctor` says more about the GPUs"
            ))),
            Self::Backend => Ok(vec![
                Variant::set("nccl", &[("RYZ_PROCESS_GROUP__BACKEND", "nccl")]),
                Variant::set("tcp", &[("RYZ_PROCESS_GROUP__BACKEND", "tcp")]),
            ]),
            Self::Copies if on_nccl => {
                Ok(vec![Variant::nccl("peer", &[]), Variant::nccl("host", &[("NCCL_P2P_DISABLE", "1")])])
            }
            Self::Copies => Ok(vec![
                Variant::set("shared_memory", &[("RYZ_PROCESS_GROUP__TCP__SHARED_MEMORY", "true")]),
                Variant::set("tcp", &[("RYZ_PROCESS_GROUP__TCP__SHARED_MEMORY", "false")]),
            ]),
            Self::Start => Ok(Start::ALL
                .map(|start| Variant { start: Some(start), ..Variant::plain(start.name()) })
                .into()),
        }
    }

    /// Refuses variables of the user that the variants would have to change. `of_user` returns where a variable is set.
    ///
    /// # Errors
    /// [`Error::Configuration`] names the variable.
    pub fn check_unset(
        self,
        variants: &[Variant],
        of_user: impl Fn(&str) -> Option<String>,
    ) -> Result<(), Error> {
        for (name, _) in variants.iter().flat_map(|variant| variant.variables) {
            if let Some(origin) = of_user(name) {
                return Err(Error::Configuration(format!(
                    "--vary {}: the variants set {name}, but {origin} already sets it and takes precedence; unset it, or \
                     measure without --vary",
                    self.name()
                )));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Vary; 5] = [Vary::Algorithm, Vary::Protocol, Vary::Backend, Vary::Copies, Vary::Start];

    fn names(vary: Vary, backend: BackendKind) -> Vec<&'static str> {
        vary.variants(backend, 2, 2).expect("variants").iter().map(|variant| variant.name).collect()
    }

    #[test]
    fn each_backend_has_variants_of_its_own() {
        assert_eq!(
            names(Vary::Algorithm, BackendKind::Nccl),
            ["nccl", "RING", "TREE", "one_shot", "two_shot"]
        );
        assert_eq!(names(Vary::Algorithm, BackendKind::Tcp).len(), Algorithm::ALL.len());
        assert_eq!(names(Vary::Protocol, BackendKind::Nccl), ["auto", "LL", "LL128", "Simple"]);
        assert_eq!(names(Vary::Copies, BackendKind::Nccl), ["peer", "host"]);
        assert_eq!(names(Vary::Copies, BackendKind::Tcp), ["shared_memory", "tcp"]);
        assert_eq!(names(Vary::Start, BackendKind::Tcp), ["reuse", "new_group", "initialize"]);
    }

    #[test]
    fn what_cannot_be_compared_here_is_refused_with_the_reason() {
        let protocol = Vary::Protocol.variants(BackendKind::Tcp, 2, 0).unwrap_err().to_string();
        assert!(protocol.contains("NCCL's") && protocol.contains("--vary algorithm"), "{protocol}");
        let backend = Vary::Backend.variants(BackendKind::Tcp, 4, 2).unwrap_err();
        assert!(backend.is_permanent());
        assert!(backend.to_string().contains("CUDA shows 2 here for 4 ranks"), "{backend}");
    }

    #[test]
    fn every_variant_says_what_it_sets_and_no_two_are_alike() {
        for (vary, backend) in ALL
            .into_iter()
            .zip([BackendKind::Nccl; 5])
            .chain([(Vary::Algorithm, BackendKind::Tcp), (Vary::Copies, BackendKind::Tcp)])
        {
            let variants = vary.variants(backend, 2, 2).expect("variants");
            let mut legends: Vec<String> = variants.iter().map(Variant::legend).collect();
            legends.dedup();
            assert_eq!(legends.len(), variants.len(), "{legends:?}");
        }
        let tree = Vary::Algorithm.variants(BackendKind::Nccl, 2, 2).expect("variants")[2];
        assert_eq!(tree.legend(), "TREE: NCCL_ALGO=Ring;allreduce:Tree --path nccl");
    }

    #[test]
    fn a_variable_of_the_user_is_not_overridden() {
        let variants = Vary::Algorithm.variants(BackendKind::Nccl, 2, 2).expect("variants");
        assert!(Vary::Algorithm.check_unset(&variants, |_| None).is_ok());
        let set = |name: &str| (name == "NCCL_ALGO").then(|| "the environment".to_owned());
        let error = Vary::Algorithm.check_unset(&variants, set).unwrap_err().to_string();
        assert!(error.contains("NCCL_ALGO") && error.contains("the environment"), "{error}");
        let protocols = Vary::Protocol.variants(BackendKind::Nccl, 2, 2).expect("variants");
        assert!(Vary::Protocol.check_unset(&protocols, set).is_ok());
    }
}
