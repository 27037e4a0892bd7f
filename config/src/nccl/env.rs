//! The map `[nccl.env]`.

use std::collections::BTreeMap;

use crate::ValueError;
use crate::setting::{Setting, public_setting};

/// NCCL's own variables: the table `[nccl.env]` of the file, or `NAME=value` pairs with spaces between them.
///
/// ```
/// let env: ryzanstein_config::NcclEnv = "NCCL_DEBUG=INFO NCCL_ALGO=Ring;allreduce:Tree".parse()?;
/// assert_eq!(env.get("NCCL_ALGO"), Some("Ring;allreduce:Tree"));
/// assert_eq!(env.to_string(), "NCCL_ALGO=Ring;allreduce:Tree NCCL_DEBUG=INFO");
/// # Ok::<(), ryzanstein_config::ValueError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NcclEnv(BTreeMap<String, String>);

impl NcclEnv {
    /// The value of a variable.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    /// Sets a variable.
    ///
    /// # Errors
    /// A name that does not begin with `NCCL_`, and a value that contains spaces.
    pub fn insert(&mut self, name: &str, value: &str) -> Result<(), ValueError> {
        let Self(one) = Self::parse(&format!("{name}={value}"))?;
        self.0.extend(one);
        Ok(())
    }

    /// Names and values, sorted by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(name, value)| (name.as_str(), value.as_str()))
    }
}

impl Setting for NcclEnv {
    const EXPECTED: &'static str =
        "a table of NCCL's variables, or NCCL_NAME=value pairs with spaces between them";
    const EXAMPLE: &'static str = "NCCL_DEBUG=INFO NCCL_MAX_CTAS=16";
    const IS_TABLE: bool = true;

    fn read(text: &str) -> Result<Self, Option<String>> {
        let mut all = BTreeMap::new();
        for pair in text.split_whitespace() {
            let Some((name, value)) = pair.split_once('=') else {
                return Err(Some(format!(
                    "`{pair}` has no `=`; set a value that contains spaces in the environment"
                )));
            };
            if !name.starts_with("NCCL_") {
                return Err(Some(format!("`{name}` does not begin with NCCL_")));
            }
            if all.insert(name.to_owned(), value.to_owned()).is_some() {
                return Err(Some(format!("{name} is given twice")));
            }
        }
        Ok(Self(all))
    }

    fn show(&self) -> String {
        let pairs: Vec<String> = self.iter().map(|(name, value)| format!("{name}={value}")).collect();
        pairs.join(" ")
    }
}

public_setting!(NcclEnv);
