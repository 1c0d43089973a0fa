//! Limits for expressions, checked before and after parsing.
//!
//! The CEL parser and interpreter recurse on the expression and have no cost limit. A stack overflow and a failed allocation abort
//! the process, so neither may be possible: the text is limited before it is parsed, independently of its grammar, and a parsed
//! expression may only call functions whose results are not larger than their arguments together, within a number of steps that is
//! computed beforehand.

use kube_cel::cel::IdedExpr;
use kube_cel::cel::common::ast::{EntryExpr, Expr, LiteralValue};

use crate::api::crd::EXPRESSION_MAX;

/// Maximum number of characters of a name in an error.
const CITED_MAX: usize = 64;
/// Maximum number of steps of one evaluation: some ten milliseconds.
pub(super) const STEPS_MAX: usize = 10_000;
/// Maximum number of elements of an attribute map; the elements of a list in the expression count as steps.
const ELEMENTS_MAX: usize = 64;
/// The cost of a regular expression in steps.
const PATTERN_STEPS: usize = 500;
/// Tokens that make a parser recurse, and their limits. Occurrences in strings and comments count too.
const MARKS: [(&[&str], usize, &str); 6] = [
    (&["(", "[", "{"], 64, "brackets"),
    (&["?"], 16, "question marks"),
    (&["."], 160, "dots"),
    (
        &["+", "-", "*", "/", "%", "<", ">", "=", "!", "&", "|"],
        512,
        "operators",
    ),
    (&["in"], 64, "times \"in\""),
    (&[","], 512, "commas"),
];
/// Fields of `device` in classic mode.
pub(super) const FIELDS: [&str; 3] = ["driver", "attributes", "capacity"];
/// Fields of `device` in `resource.k8s.io/v1`.
pub(super) const STRUCTURED_FIELDS: [&str; 4] =
    ["driver", "attributes", "capacity", "allowMultipleAllocations"];
/// Functions that an expression may call: those of a Kubernetes selector, except those that make large values from small ones.
const FUNCTIONS: [&str; 35] = [
    "add",
    "asApproximateFloat",
    "asInteger",
    "charAt",
    "compareTo",
    "contains",
    "double",
    "endsWith",
    "hasValue",
    "indexOf",
    "int",
    "isGreaterThan",
    "isInteger",
    "isLessThan",
    "isQuantity",
    "isSemver",
    "lastIndexOf",
    "lowerAscii",
    "major",
    "matches",
    "minor",
    "or",
    "orValue",
    "patch",
    "quantity",
    "semver",
    "sign",
    "size",
    "startsWith",
    "string",
    "sub",
    "substring",
    "trim",
    "upperAscii",
    "value",
];

/// Rejects a text that must not be parsed.
pub(super) fn text(expression: &str) -> Result<(), String> {
    if !(1..=EXPRESSION_MAX).contains(&expression.len()) {
        return Err(format!(
            "it has {} bytes; 1 to {EXPRESSION_MAX} are allowed",
            expression.len()
        ));
    }
    for (marks, most, name) in MARKS {
        let number: usize = marks.iter().map(|mark| expression.matches(mark).count()).sum();
        if number > most {
            return Err(format!(
                "it has {number} {name}; at most {most} are allowed: make it shorter"
            ));
        }
    }
    Ok(())
}

/// A name in quotes, truncated because an event has little room.
fn cited(name: &str) -> String {
    let shown: String = name.chars().take(CITED_MAX).collect();
    if shown == name {
        format!("{name:?}")
    } else {
        format!("{shown:?}...")
    }
}

/// The inputs that an expression uses.
#[derive(Debug)]
pub(super) struct Needs<'f> {
    fields: &'f [&'f str],
    /// The string keys used on maps: each is added as an empty domain, so that a domain without attributes is an empty map.
    pub(super) keys: Vec<String>,
    variables: Vec<String>,
    comprehension: bool,
}

impl<'f> Needs<'f> {
    /// Rejects an expression that must not be evaluated. `fields` are those of `device`.
    pub(super) fn of(expression: &IdedExpr, fields: &'f [&'f str]) -> Result<Self, String> {
        let mut needs = Self {
            fields,
            keys: Vec::new(),
            variables: Vec::new(),
            comprehension: false,
        };
        let steps = needs.steps(expression)?;
        if steps > STEPS_MAX {
            return Err(format!(
                "one evaluation takes up to {steps} steps; at most {STEPS_MAX} are allowed: make it simpler"
            ));
        }
        Ok(needs)
    }

    fn all<'a>(&mut self, expressions: impl IntoIterator<Item = &'a IdedExpr>) -> Result<usize, String> {
        expressions.into_iter().try_fold(0_usize, |sum, expression| {
            Ok(sum.saturating_add(self.steps(expression)?))
        })
    }

    /// Rejects a field that `device` does not have.
    fn check_field(&self, operand: &IdedExpr, field: &str) -> Result<(), String> {
        if !matches!(&operand.expr, Expr::Ident(name) if name == "device") || self.fields.contains(&field) {
            return Ok(());
        }
        let (last, others) = self.fields.split_last().unwrap_or((&"", &[]));
        Err(format!(
            "device has no {}, only {} and {last}",
            cited(field),
            others.join(", ")
        ))
    }

    fn steps(&mut self, expression: &IdedExpr) -> Result<usize, String> {
        let inner = match &expression.expr {
            Expr::Unspecified | Expr::Literal(_) => 0,
            Expr::Ident(name) if name == "device" || self.variables.contains(name) => 0,
            Expr::Ident(name) => return Err(format!("there is no variable {}, only device", cited(name))),
            Expr::Select(select) => {
                self.check_field(&select.operand, &select.field)?;
                self.steps(&select.operand)?
            }
            Expr::Call(call) => {
                let name = call.func_name.as_str();
                let operator = name.starts_with(['_', '@', '!', '-']);
                if !operator && !FUNCTIONS.contains(&name) {
                    return Err(format!("there is no function {} in selectors", cited(name)));
                }
                if let [operand, key] = call.args.as_slice()
                    && let Expr::Literal(LiteralValue::String(key)) = &key.expr
                {
                    match name {
                        "_[_]" | "_[?_]" => self.keys.push(key.inner().to_owned()),
                        "_?._" => self.check_field(operand, key.inner())?,
                        _ => {}
                    }
                }
                let own = if name == "matches" { PATTERN_STEPS } else { 0 };
                self.all(call.target.as_deref().into_iter().chain(&call.args))?
                    .saturating_add(own)
            }
            Expr::List(list) => self.all(&list.elements)?,
            Expr::Map(map) => {
                let mut sum = 0_usize;
                for entry in &map.entries {
                    let EntryExpr::MapEntry(entry) = &entry.expr else {
                        return Err("it makes an object; selectors have no types".to_owned());
                    };
                    sum = sum.saturating_add(self.all([&entry.key, &entry.value])?);
                }
                sum
            }
            Expr::Struct(made) => {
                return Err(format!(
                    "it makes an object of type {}; selectors have no types",
                    cited(&made.type_name)
                ));
            }
            Expr::Comprehension(comprehension) => {
                if std::mem::replace(&mut self.comprehension, true) {
                    return Err(
                        "it has more than one of all, exists, exists_one, filter and map; make selectors of their \
                         own of them, all of which must hold"
                            .to_owned(),
                    );
                }
                let range = self.all([&comprehension.iter_range, &comprehension.accu_init])?;
                let names = [&comprehension.iter_var, &comprehension.accu_var];
                self.variables
                    .extend(names.into_iter().chain(&comprehension.iter_var2).cloned());
                let step = self.all([
                    &comprehension.loop_cond,
                    &comprehension.loop_step,
                    &comprehension.result,
                ])?;
                let elements = range.saturating_add(ELEMENTS_MAX);
                range.saturating_add(elements.saturating_mul(step))
            }
        };
        Ok(inner.saturating_add(1))
    }
}
