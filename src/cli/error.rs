//! [`Error`]: why the program ends early, and its exit code.

use std::process::ExitCode;

/// Why the program ends early.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A flag, a file or the environment is invalid; a restart fails again until the user changes it.
    #[error("{0}")]
    Configuration(String),
    /// The program failed at run time; a restart may help.
    #[error("{0:#}")]
    Runtime(#[from] anyhow::Error),
}

impl Error {
    /// A CamelCase reason from a small fixed set.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Configuration(_) => "ConfigurationInvalid",
            Self::Runtime(_) => "Failed",
        }
    }

    /// Exit code: 2 for invalid configuration, as clap returns for flags; 1 for everything else.
    pub fn exit_code(&self) -> ExitCode {
        match self {
            Self::Configuration(_) => ExitCode::from(2),
            Self::Runtime(_) => ExitCode::FAILURE,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_runtime_error_tells_all_its_causes() {
        let cause = anyhow::anyhow!("connection refused").context("cannot list ResourceClaims");

        assert_eq!(
            Error::from(cause).to_string(),
            "cannot list ResourceClaims: connection refused"
        );
    }

    #[test]
    fn what_no_restart_can_cure_has_an_exit_code_of_its_own() {
        let configuration = Error::Configuration("--config is missing".to_owned());
        let runtime = Error::from(anyhow::anyhow!("gone"));

        assert_eq!(
            format!("{:?}", configuration.exit_code()),
            format!("{:?}", ExitCode::from(2))
        );
        assert_eq!(
            format!("{:?}", runtime.exit_code()),
            format!("{:?}", ExitCode::from(1))
        );
        assert_ne!(configuration.reason(), runtime.reason());
    }
}
