//! The subsystems of NCCL's log.

use crate::keys::nearest;
use crate::setting::{Setting, public_setting};

const NAMES: [&str; 17] = [
    "INIT",
    "COLL",
    "P2P",
    "SHM",
    "NET",
    "GRAPH",
    "TUNING",
    "ENV",
    "ALLOC",
    "CALL",
    "PROXY",
    "NVLS",
    "BOOTSTRAP",
    "REG",
    "PROFILE",
    "RAS",
    "ALL",
];

/// A list of NCCL subsystems, such as `INIT,GRAPH`; a leading `^` means all except these.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct NcclSubsystems(String);

impl NcclSubsystems {
    /// The list as NCCL reads it.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Setting for NcclSubsystems {
    const EXPECTED: &'static str = "NCCL subsystems separated by commas, of INIT, COLL, P2P, SHM, NET, GRAPH, TUNING, \
        ENV, ALLOC, CALL, PROXY, NVLS, BOOTSTRAP, REG, PROFILE, RAS, ALL, or ^ before those to exclude";
    const EXAMPLE: &'static str = "INIT,GRAPH";

    fn read(text: &str) -> Result<Self, Option<String>> {
        let text = text.trim().to_uppercase();
        let list = text.strip_prefix('^').unwrap_or(&text);
        for name in list.split(',') {
            if !NAMES.contains(&name) {
                let near = nearest(name, NAMES.iter().map(|&known| known.to_owned()));
                return Err(near.map(|near| format!("did you mean `{near}`?")));
            }
        }
        Ok(Self(text))
    }

    fn show(&self) -> String {
        self.0.clone()
    }
}

public_setting!(NcclSubsystems);
