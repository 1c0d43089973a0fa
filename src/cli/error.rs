//! [`Error`]: why the program ends early, and its exit code.

use std::process::ExitCode;

use kube::core::Status;

/// Why the program ends early.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A flag, a file or the environment is invalid; a restart fails again until the user changes it.
    #[error("{0}")]
    Configuration(String),
    /// The program failed at run time; a restart may help.
    #[error("{}", causes(.0))]
    Runtime(#[from] anyhow::Error),
    /// A diagnostic command got no answer.
    #[error("{}", causes(.0))]
    Unanswered(anyhow::Error),
}

impl Error {
    /// A CamelCase reason from a small fixed set.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Configuration(_) => "ConfigurationInvalid",
            Self::Runtime(_) => "Failed",
            Self::Unanswered(_) => "Unanswered",
        }
    }

    /// Converts a run-time error of a diagnostic command.
    pub(super) fn unanswered(self) -> Self {
        match self {
            Self::Runtime(error) => Self::Unanswered(error),
            other => other,
        }
    }

    /// Exit code: 2 for invalid configuration, as clap returns for flags; 3 for an unanswered question; 1 for everything
    /// else, and for the answer no.
    pub fn exit_code(&self) -> ExitCode {
        match self {
            Self::Configuration(_) => ExitCode::from(2),
            Self::Runtime(_) => ExitCode::FAILURE,
            Self::Unanswered(_) => ExitCode::from(3),
        }
    }
}

/// Joins an error and its causes. Skips a cause whose text the error before ends with: some errors contain the text of their source.
fn causes(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain() {
        let (cause, is_last) = match cause.downcast_ref() {
            Some(kube::Error::Api(status)) => (rejected(status), true),
            Some(kube::Error::Service(error)) => (error.to_string(), false),
            _ => (cause.to_string(), false),
        };
        if !text.ends_with(&cause) {
            text += if text.is_empty() { "" } else { ": " };
            text += &cause;
        }
        if is_last {
            break;
        }
    }
    text
}

/// The API server's own message, as kubectl prints it; for a missing right, it names the verb and the resource.
fn rejected(status: &Status) -> String {
    match status.code {
        401 => "the API server does not accept the credentials (401 Unauthorized)".to_owned(),
        code if status.message.is_empty() => format!("the API server answers {code} {}", status.reason),
        _ => status.message.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_runtime_error_has_all_its_causes() {
        let cause = anyhow::anyhow!("connection refused").context("cannot list ResourceClaims");

        assert_eq!(
            Error::from(cause).to_string(),
            "cannot list ResourceClaims: connection refused"
        );
        let repeated = anyhow::anyhow!("connection refused").context("request: connection refused");
        assert_eq!(Error::from(repeated).to_string(), "request: connection refused");
    }

    #[test]
    fn a_configuration_error_has_its_own_exit_code() {
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
        let unanswered = runtime.unanswered();
        assert_eq!(
            format!("{:?}", unanswered.exit_code()),
            format!("{:?}", ExitCode::from(3))
        );
    }
}
