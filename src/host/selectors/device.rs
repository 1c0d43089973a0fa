//! Selectors of DeviceClasses and claims of `resource.k8s.io/v1`.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::Device;

use super::{Compiled, Environment, STACK};
use crate::core::allocation::selectors::Match;

/// Compiled selectors of structured mode. [`with_selectors`] provides the stack that they need.
#[allow(missing_debug_implementations, reason = "the context of CEL has none")]
pub struct DeviceSelectors {
    environment: Environment,
    programs: BTreeMap<String, Result<Compiled, String>>,
}

impl DeviceSelectors {
    /// Evaluates an expression against a device of a driver. An invalid expression fails on every device.
    pub fn evaluate(&mut self, expression: &str, driver: &str, device: &Device) -> Match {
        if !self.programs.contains_key(expression) {
            let compiled = Compiled::structured(expression);
            self.programs.insert(expression.to_owned(), compiled);
        }
        match self.programs.get(expression) {
            Some(Ok(compiled)) => compiled.evaluate_device(&self.environment, driver, device),
            Some(Err(error)) => Match::Failed(error.as_str().into()),
            None => Match::Failed("it was not compiled".into()),
        }
    }
}

/// Runs `work` on a thread with a stack of [`STACK`] bytes, and waits for it.
pub fn with_selectors<T: Send>(work: impl FnOnce(&mut DeviceSelectors) -> T + Send) -> Result<T, String> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new()
            .name("selectors".to_owned())
            .stack_size(STACK);
        let run = || {
            let mut selectors = DeviceSelectors {
                environment: Environment::new(""),
                programs: BTreeMap::new(),
            };
            work(&mut selectors)
        };
        let running = thread
            .spawn_scoped(scope, run)
            .map_err(|error| format!("no thread to evaluate selectors on: {error}"))?;
        running
            .join()
            .map_err(|_| "selectors cannot be evaluated".to_owned())
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn device() -> Device {
        serde_json::from_value(json!({
            "name": "camera-1",
            "attributes": {
                "drayman.dev/kind": { "string": "cameras" },
                "vendor": { "string": "0403" },
                "firmware": { "version": "1.10.0" },
                "spare": { "bool": false },
                "resource.kubernetes.io/numaNode": { "int": 1 },
            },
            "capacity": { "memory": { "value": "40Gi" }, "drayman.dev/shares": { "value": "4" } },
            "allowMultipleAllocations": true,
        }))
        .unwrap()
    }

    fn evaluate(expression: &str) -> Match {
        with_selectors(|selectors| selectors.evaluate(expression, "a.example", &device())).unwrap()
    }

    #[test]
    fn devices_are_selected_as_by_the_scheduler() {
        for expression in [
            r#"device.driver == "a.example" && device.attributes["drayman.dev"].kind == "cameras""#,
            r#"device.attributes["a.example"].vendor == "0403""#,
            r#"device.attributes["a.example"].firmware.isGreaterThan(semver("1.9.0"))"#,
            r#"!device.attributes["a.example"].spare"#,
            r#"device.attributes["resource.kubernetes.io"].numaNode == 1"#,
            r#"!has(device.attributes["other.example"].model)"#,
            r#"device.capacity["a.example"].memory.compareTo(quantity("40Gi")) == 0"#,
            r#"device.capacity["a.example"].memory.isGreaterThan(quantity("1Gi"))"#,
            r#"device.capacity["drayman.dev"].shares.compareTo(quantity("4")) == 0"#,
            r#"!has(device.capacity["a.example"].bandwidth)"#,
            "device.allowMultipleAllocations",
        ] {
            assert_eq!(evaluate(expression), Match::Yes, "{expression}");
        }
        assert_eq!(evaluate(r#"device.driver == "drayman.dev""#), Match::No);
    }

    #[test]
    fn a_wrong_selector_fails_with_its_error() {
        for (expression, says) in [
            (r#"device.attributes["a.example"].model == "x""#, "model"),
            (
                "device.kind == 'x'",
                "only driver, attributes, capacity and allowMultipleAllocations",
            ),
            ("device.driver ==", "ERROR"),
        ] {
            let Match::Failed(error) = evaluate(expression) else {
                panic!("{expression}")
            };
            assert!(error.contains(says), "{expression}: {error}");
        }
    }
}
