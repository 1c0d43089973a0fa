//! Compiled expressions.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use k8s_openapi::api::resource::v1::{Device, DeviceAttribute};
use kube_cel::KubeCelExt;
use kube_cel::cel::common::ast::{EntryExpr, Expr, operators};
use kube_cel::cel::objects::{Key, Map};
use kube_cel::cel::parser::{Expression, Parser};
use kube_cel::cel::{Context, ExecutionError, Program, Value};

use crate::core::allocation::inventory::{Attribute, AttributeSet};
use crate::core::allocation::selectors::Match;
use crate::host::selectors::guard::{self, Needs};

/// Maximum number of characters of an error text.
const ERROR_MAX: usize = 200;

/// The environment of all evaluations.
#[allow(missing_debug_implementations, reason = "the context of CEL has none")]
pub struct Environment {
    context: Context<'static>,
    version: Option<Program>,
    quantity: Option<Program>,
    driver: Arc<String>,
}

/// The device of an evaluation.
struct Input<'a> {
    driver: &'a str,
    attributes: Vec<(&'a str, Value)>,
    capacity: Vec<(&'a str, Value)>,
    /// Absent in classic mode.
    allow_multiple_allocations: Option<bool>,
}

/// A compiled expression that passed all limits.
#[allow(missing_debug_implementations, reason = "the program of CEL has none")]
pub struct Compiled {
    expression: Expression,
    keys: Vec<String>,
}

impl Environment {
    /// Returns the environment for the devices of one driver: attribute names without a domain belong to `driver`.
    pub fn new(driver: &str) -> Self {
        Self {
            context: Context::default().with_all(),
            version: Program::compile("semver(text)").ok(),
            quantity: Program::compile("quantity(text)").ok(),
            driver: Arc::new(driver.to_owned()),
        }
    }

    fn parse(&self, program: Option<&Program>, text: &str) -> Option<Value> {
        let mut context = self.context.new_inner_scope();
        context.add_variable_from_value("text", text.to_owned());
        program?.execute(&context).ok()
    }

    fn value(&self, attribute: &Attribute) -> Option<Value> {
        Some(match attribute {
            Attribute::String(text) => Value::String(Arc::new(text.to_string())),
            Attribute::Int(number) => Value::Int(*number),
            Attribute::Bool(value) => Value::Bool(*value),
            Attribute::Version(text) => self.parse(self.version.as_ref(), text)?,
        })
    }

    /// The value of an attribute of `resource.k8s.io/v1`.
    fn device_value(&self, attribute: &DeviceAttribute) -> Option<Value> {
        let string = || {
            let text = attribute.string.as_ref()?;
            Some(Value::String(Arc::new(text.clone())))
        };
        let version = || self.parse(self.version.as_ref(), attribute.version.as_deref()?);
        let number = attribute.int.map(Value::Int);
        number
            .or_else(|| attribute.bool.map(Value::Bool))
            .or_else(string)
            .or_else(version)
    }

    fn device(input: Input<'_>, keys: &[String]) -> Value {
        let mut empty: BTreeMap<&str, HashMap<Key, Value>> = BTreeMap::new();
        for key in keys {
            empty.entry(key).or_default();
        }
        let by_domain = |values: Vec<(&str, Value)>| {
            let mut domains: BTreeMap<String, HashMap<Key, Value>> = empty
                .iter()
                .map(|(domain, none)| ((*domain).to_owned(), none.clone()))
                .collect();
            for (name, value) in values {
                // As in Kubernetes, a name without a domain belongs to the driver.
                let (domain, name) = name.split_once('/').unwrap_or((input.driver, name));
                domains
                    .entry(domain.to_owned())
                    .or_default()
                    .insert(name.into(), value);
            }
            map(domains)
        };
        let mut fields: HashMap<Key, Value> = HashMap::from([
            ("driver".into(), Value::String(Arc::new(input.driver.to_owned()))),
            ("attributes".into(), by_domain(input.attributes)),
            ("capacity".into(), by_domain(input.capacity)),
        ]);
        if let Some(allowed) = input.allow_multiple_allocations {
            fields.insert("allowMultipleAllocations".into(), Value::Bool(allowed));
        }
        Value::Map(Map {
            map: Arc::new(fields),
        })
    }
}

fn map(domains: BTreeMap<String, HashMap<Key, Value>>) -> Value {
    let domain = |(name, values): (String, _)| {
        (
            name.into(),
            Value::Map(Map {
                map: Arc::new(values),
            }),
        )
    };
    let domains: HashMap<Key, Value> = domains.into_iter().map(domain).collect();
    Value::Map(Map {
        map: Arc::new(domains),
    })
}

impl Compiled {
    /// Compiles an expression, or returns its error. Needs a stack of some megabytes ([`STACK`](super::STACK)), more than the main
    /// thread and a runtime's threads have.
    pub fn new(expression: &str) -> Result<Self, String> {
        Self::with_fields(expression, &guard::FIELDS)
    }

    /// Compiles an expression of `resource.k8s.io/v1`. Needs the same stack.
    pub fn structured(expression: &str) -> Result<Self, String> {
        Self::with_fields(expression, &guard::STRUCTURED_FIELDS)
    }

    fn with_fields(expression: &str, fields: &[&str]) -> Result<Self, String> {
        guard::text(expression)?;
        // Kubernetes has optional values since 1.28.
        let parser = Parser::default().enable_optional_syntax(true);
        let mut expression = parser
            .parse(expression)
            .map_err(|errors| shortened(&errors.to_string()))?;
        let keys = Needs::of(&expression, fields)?.keys;
        index_optionally(&mut expression);
        Ok(Self { expression, keys })
    }

    /// Evaluates the expression against a device's attributes. Needs the same stack.
    pub fn evaluate(&self, environment: &Environment, attributes: &AttributeSet) -> Match {
        let values = attributes
            .iter()
            .filter_map(|(name, value)| Some((&**name, environment.value(value)?)));
        self.execute(
            environment,
            Input {
                driver: &environment.driver,
                attributes: values.collect(),
                capacity: Vec::new(),
                allow_multiple_allocations: None,
            },
        )
    }

    /// Evaluates the expression against a device of a ResourceSlice of `driver`. Needs the same stack.
    pub fn evaluate_device(&self, environment: &Environment, driver: &str, device: &Device) -> Match {
        let attributes = device.attributes.iter().flatten();
        let capacity = device.capacity.iter().flatten();
        self.execute(
            environment,
            Input {
                driver,
                attributes: attributes
                    .filter_map(|(name, value)| Some((name.as_str(), environment.device_value(value)?)))
                    .collect(),
                capacity: capacity
                    .filter_map(|(name, of)| {
                        Some((
                            name.as_str(),
                            environment.parse(environment.quantity.as_ref(), &of.value.0)?,
                        ))
                    })
                    .collect(),
                allow_multiple_allocations: Some(device.allow_multiple_allocations == Some(true)),
            },
        )
    }

    fn execute(&self, environment: &Environment, input: Input<'_>) -> Match {
        let mut context = environment.context.new_inner_scope();
        context.add_variable_from_value("device", Environment::device(input, &self.keys));
        match Value::resolve(&self.expression, &context) {
            Ok(Value::Bool(true)) => Match::Yes,
            Ok(Value::Bool(false)) => Match::No,
            Ok(_) => Match::Failed("the result is neither true nor false".into()),
            Err(error) => Match::Failed(shortened(&told(&error)).into()),
        }
    }
}

/// Replaces `map.?key` by `map[?"key"]`, which means the same: cel 0.13 fails on the former if the key is missing.
fn index_optionally(expression: &mut Expression) {
    match &mut expression.expr {
        Expr::Call(call) => {
            if call.func_name == operators::OPT_SELECT {
                operators::OPT_INDEX.clone_into(&mut call.func_name);
            }
            call.target.as_deref_mut().into_iter().for_each(index_optionally);
            call.args.iter_mut().for_each(index_optionally);
        }
        Expr::Select(select) => index_optionally(&mut select.operand),
        Expr::List(list) => list.elements.iter_mut().for_each(index_optionally),
        Expr::Map(map) => {
            for entry in &mut map.entries {
                if let EntryExpr::MapEntry(entry) = &mut entry.expr {
                    index_optionally(&mut entry.key);
                    index_optionally(&mut entry.value);
                }
            }
        }
        Expr::Comprehension(comprehension) => {
            for part in [
                &mut comprehension.iter_range,
                &mut comprehension.accu_init,
                &mut comprehension.loop_cond,
                &mut comprehension.loop_step,
                &mut comprehension.result,
            ] {
                index_optionally(part);
            }
        }
        Expr::Unspecified | Expr::Literal(_) | Expr::Ident(_) | Expr::Struct(_) => {}
    }
}

/// An error's text without the maps it cites: they are as long as a device's attribute list, and their order changes each time,
/// so the same error would be reported retry_at and retry_at.
fn told(error: &ExecutionError) -> String {
    match error {
        ExecutionError::UnsupportedTargetType { target } => {
            format!("a function is not for {}", shown(target))
        }
        ExecutionError::NotSupportedAsMethod { method, target } => {
            format!("there is no function {method:?} of {}", shown(target))
        }
        ExecutionError::UnsupportedKeyType(value) => format!("{} cannot be a key of a map", shown(value)),
        ExecutionError::ValuesNotComparable(left, right) => {
            format!("{} cannot be compared to {}", shown(left), shown(right))
        }
        ExecutionError::UnsupportedUnaryOperator(operator, value) => {
            format!("operator {operator:?} is not for {}", shown(value))
        }
        ExecutionError::UnsupportedBinaryOperator(operator, left, right) => {
            format!(
                "operator {operator:?} is not for {} and {}",
                shown(left),
                shown(right)
            )
        }
        ExecutionError::UnsupportedMapIndex(value) => format!("a map has no {}", shown(value)),
        ExecutionError::UnsupportedListIndex(value) => format!("a list has no {}", shown(value)),
        ExecutionError::UnsupportedIndex(index, value) => {
            format!("there is no {} in {}", shown(index), shown(value))
        }
        ExecutionError::FunctionError { function, message } if message.contains("Map(") => {
            format!("function {function:?} is not for a map")
        }
        other => other.to_string(),
    }
}

fn shown(value: &Value) -> String {
    match value {
        Value::Map(_) => "a map".to_owned(),
        Value::List(_) => "a list".to_owned(),
        Value::Opaque(_) => "a version or a quantity".to_owned(),
        Value::Int(number) => number.to_string(),
        Value::UInt(number) => format!("{number}u"),
        Value::Float(number) => number.to_string(),
        Value::Bool(value) => value.to_string(),
        Value::String(text) => format!("{text:?}"),
        Value::Null => "null".to_owned(),
        other => other.type_of().to_string(),
    }
}

fn shortened(text: &str) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    line.chars().take(ERROR_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attributes() -> AttributeSet {
        let attribute = |name: &str, value| (Box::from(name), value);
        [
            attribute("drayman.dev/firmware", Attribute::Version("1.10.0".into())),
            attribute("drayman.dev/numaNode", Attribute::Int(1)),
            attribute("drayman.dev/spare", Attribute::Bool(false)),
            attribute("drayman.dev/vendor", Attribute::String("0403".into())),
        ]
        .into_iter()
        .collect()
    }

    fn evaluate(expression: &str) -> Match {
        let compiled = Compiled::new(expression).unwrap_or_else(|error| panic!("{expression}: {error}"));
        compiled.evaluate(&Environment::new("drayman.dev"), &attributes())
    }

    #[test]
    fn devices_are_selected_as_in_kubernetes() {
        for expression in [
            r#"device.driver == "drayman.dev""#,
            r#"device.attributes["drayman.dev"].vendor == "0403""#,
            r#"device.attributes["drayman.dev"].vendor.startsWith("04") && device.attributes["drayman.dev"].numaNode > 0"#,
            r#"device.attributes["drayman.dev"].vendor in ["0403", "10de"]"#,
            r#"has(device.attributes["drayman.dev"].vendor)"#,
            r#"!has(device.attributes["drayman.dev"].model)"#,
            r#"!has(device.attributes["other.example"].model)"#,
            r#"!("model" in device.attributes["other.example"])"#,
            r#"!has(device.capacity["drayman.dev"].memory)"#,
            r#"device.attributes["drayman.dev"].firmware.isGreaterThan(semver("1.9.0"))"#,
            r#"device.attributes["drayman.dev"].firmware.compareTo(semver("1.10.0")) == 0"#,
            r#"quantity("40Gi").isGreaterThan(quantity("1Gi"))"#,
            r#"device.attributes["drayman.dev"].vendor.matches("^04..$")"#,
            r#"["0403"].exists(vendor, vendor == device.attributes["drayman.dev"].vendor)"#,
            "!device.attributes[\"drayman.dev\"].spare",
            "true",
        ] {
            assert_eq!(evaluate(expression), Match::Yes, "{expression}");
        }
        assert_eq!(evaluate("device.driver == 'other.example'"), Match::No);
    }

    #[test]
    fn a_missing_or_mistyped_attribute_is_an_error() {
        for (expression, says) in [
            ("device.attributes['drayman.dev'].model == 'x'", "model"),
            ("device.attributes['drayman.dev'].vendor > 1", "No such overload"),
            (
                "device.attributes['drayman.dev'].vendor",
                "neither true nor false",
            ),
            ("1 / 0 == 1", "zero"),
        ] {
            let Match::Failed(error) = evaluate(expression) else {
                panic!("{expression}")
            };
            assert!(error.contains(says), "{expression}: {error}");
        }
    }

    #[test]
    fn an_error_about_a_map_is_short_and_the_same_each_time() {
        let expression = "device.attributes + 'x' == 'x'";
        let Match::Failed(error) = evaluate(expression) else {
            panic!("{expression}")
        };
        assert!(error.contains("a map and \"x\""), "{error}");
        for _ in 0..20 {
            assert_eq!(evaluate(expression), Match::Failed(error.clone()));
        }
    }

    #[test]
    fn a_name_that_nobody_reads_to_its_end_is_cited_in_part() {
        let long = "i".repeat(2_400);
        let made = format!("{long}{{}}.x");
        for expression in [
            &long,
            &format!("device.{long}"),
            &format!("device.{long}()"),
            &made,
        ] {
            let error = Compiled::new(expression).err().unwrap();
            assert!(error.contains("iii") && error.len() < 300, "{error}");
        }
    }

    #[test]
    fn what_is_not_a_selector_is_refused_with_the_reason() {
        for (expression, says) in [
            ("", "0 bytes"),
            ("devices.driver == 'x'", "no variable \"devices\""),
            ("device.atributes['x'].y", "device has no \"atributes\""),
            ("device.driver ==", "ERROR"),
            ("device.driver.replace('', 'x') == 'x'", "no function \"replace\""),
            ("[1].all(x, [2].all(y, x < y))", "more than one of all"),
            ("[1].map(x, x).map(y, y) == [1]", "more than one of all"),
            ("Thing{name: 1} == 1", "no types"),
        ] {
            let error = Compiled::new(expression).err().unwrap_or_default();
            assert!(error.contains(says), "{expression}: {error}");
        }
    }
}
