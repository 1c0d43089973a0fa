//! [`Error`]: why the program ends before its time, and with which exit code.

use std::process::ExitCode;

/// Why the program ends before its time.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A flag, a file or the environment is wrong: the same start will fail again until somebody changes it.
    #[error("{0}")]
    Configuration(String),
    /// The program was started well and failed later, so that a new start may help.
    #[error("{0:#}")]
    Runtime(#[from] anyhow::Error),
}

impl Error {
    /// CamelCase, from a small fixed set.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Configuration(_) => "ConfigurationInvalid",
            Self::Runtime(_) => "Failed",
        }
    }

    /// 2 for what was wrong from the start, as clap has it for flags; 1 for everything else.
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
