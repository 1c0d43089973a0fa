//! Selectors: compiles and evaluates their expressions (CEL), and counts those in use.
//!
//! Evaluation is without risk for the process: on one separate thread with a large stack, within limits that are checked beforehand, and
//! with a deadline after which the thread is abandoned. Namespaces take turns, and so do the expressions of each ([`FairQueue`]).
//!
//! The CEL parser and interpreter recurse on the expression and have no cost limit. A stack overflow, a failed allocation and a panic
//! end the process, so none may be possible: the text is limited before it is parsed, independently of its grammar, and a parsed
//! expression may only call functions whose results are not larger than their arguments together, within a number of steps that is
//! computed beforehand from the sizes of all values ([`Cost`]).

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::{Duration, Instant};

use k8s_openapi::api::resource::v1::{Device, DeviceAttribute};
use kube_cel::KubeCelExt;
use kube_cel::cel::common::ast::{CallExpr, ComprehensionExpr, EntryExpr, Expr, LiteralValue, operators};
use kube_cel::cel::extractors::This;
use kube_cel::cel::functions;
use kube_cel::cel::objects::{Key, Map};
use kube_cel::cel::parser::{Expression, Parser};
use kube_cel::cel::{Context, ExecutionError, IdedExpr, Program, Value};
use regex::{Regex, RegexBuilder};
use tokio::sync::{Mutex as AsyncMutex, MutexGuard, OwnedMutexGuard, oneshot};

use crate::api::crd::{ATTRIBUTE_NAME_MAX, EXPRESSION_MAX, REQUESTS_MAX, SELECTORS_MAX};
use crate::core::allocation::inventory::{Attribute, AttributeSet, Match};
use crate::core::allocation::parameters::CheckedSelector;
use crate::core::scheduler::Evaluate;
use crate::driver::DriverError;
use crate::driver::keyed_locks::KeyedLocks;

/// Stack size in bytes of the thread that parses and evaluates expressions. The limits on expressions keep their stack usage well
/// below it.
pub const STACK: usize = 16 << 20;
/// Maximum number of devices evaluated in one turn.
pub(crate) const CHUNK: usize = 256;
/// Time after which a turn starts no further device, so that others get theirs.
const TURN: Duration = Duration::from_millis(100);
/// Time limit of a turn, in case an evaluation does not end.
const DEADLINE: Duration = Duration::from_secs(5);
/// Number of compiled programs in the cache: a few for each claim that waits for its turn. The oldest is evicted.
const PROGRAMS_MAX: usize = 64;
/// Maximum number of different expressions in use by the objects of one namespace: as many as one object can have.
const NAMESPACE_EXPRESSIONS_MAX: usize = REQUESTS_MAX * SELECTORS_MAX;
/// The same limit for all namespaces together. With the stored errors, each expression takes up to seven bits per different device: this
/// is below 10 MB with 5,000 of them.
const EXPRESSIONS_MAX: usize = 8 * NAMESPACE_EXPRESSIONS_MAX;
/// Delay before the first retry of an expression that was not evaluated in time; doubled with each failure.
const UNFINISHED_RETRY_INTERVAL: Duration = Duration::from_secs(5);
/// The longest of these delays.
const MAX_UNFINISHED_RETRY_INTERVAL: Duration = Duration::from_secs(300);
/// Maximum number of characters of an error text.
const ERROR_MAX: usize = 200;
/// Maximum number of errors of the parser that are shown: these fill an error text.
const PARSE_ERRORS_MAX: usize = 8;
/// Maximum number of characters of a name in an error.
const CITED_MAX: usize = 64;
/// The advice at the end of an error about the length of an expression.
const SHORTER: &str = ": make it shorter";
/// The same for its number of steps.
const SIMPLER: &str = ": make it simpler";
/// Maximum number of steps of one evaluation: some ten milliseconds, or up to a second with regular expressions.
const STEPS_MAX: usize = 10_000;
/// Number of bytes of text that count as one part of a value.
const PART: usize = 64;
/// Estimates for the device: its parts, which are also the elements of its largest map, and the size of their keys.
const DEVICE: Cost = Cost {
    steps: 0,
    size: 64,
    element: 2,
};
/// Number of parts of a new list or map that cost one step: it keeps copies of its elements.
const MADE_PER_STEP: usize = 4;
/// Number of parts that a function or operator reads in one step.
const READ_PER_STEP: usize = 128;
/// The cost of a regular expression in steps, and of each part of its text: it is compiled for each evaluation.
const PATTERN_STEPS: usize = 450;
const PATTERN_PART_STEPS: usize = 50;
/// Maximum size in bytes of a compiled regular expression, and of the cache of its search, for a text of up to [`SHORT_TEXT`] bytes. The time
/// of a search grows with this size and with the length of the text, so the limit is lower for longer texts. Unicode makes classes such as
/// `\w` large.
const PATTERN_MAX: usize = 2 << 20;
/// With this length in bytes, a search with the largest pattern takes some hundredths of a second.
const SHORT_TEXT: usize = 64;
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
/// How often a minus sign may follow another, as in `1 - -1`.
const REPEATED_MAX: usize = 4;
/// Matches the token, white space or comment at the start of a text, as the parser reads it (`CEL.g4` of cel 0.13).
static TOKEN: LazyLock<Result<Regex, regex::Error>> = LazyLock::new(|| {
    let escape =
        r#"\\(?:[abfnrtv"'\\?`]|[xX][[:xdigit:]]{2}|u[[:xdigit:]]{4}|U[[:xdigit:]]{8}|[0-3][0-7]{2})"#;
    let token = r#"(?x)^(?:
        [\t\n\f\r\x20]+ | //[^\n]*
        | [bB]?[rR] (?: """[^\x00]*?""" | '''[^\x00]*?''' | "[^"\n\r]*" | '[^'\n\r]*' )
        | [bB]? (?:
            """(?:ESCAPE|[^\\])*?""" | '''(?:ESCAPE|[^\\])*?''' | "(?:ESCAPE|[^\\"\n\r])*" | '(?:ESCAPE|[^\\'\n\r])*'
        )
        | 0x[[:xdigit:]]+[uU]? | [0-9]+[uU] | (?: [0-9]+(?:\.[0-9]+)? | \.[0-9]+ ) (?:[eE][-+]?[0-9]+)?
        | [A-Za-z_][A-Za-z0-9_]* | `[A-Za-z0-9_.\-/\x20]+`
        | [=!<>]= | && | \|\| | [-!<>()\[\]{}.,?:+*/%]
    )"#;
    Regex::new(&token.replace("ESCAPE", escape))
});
/// Fields of `device` in classic mode.
const FIELDS: [&str; 3] = ["driver", "attributes", "capacity"];
/// Fields of `device` in `resource.k8s.io/v1`.
const STRUCTURED_FIELDS: [&str; 4] = ["driver", "attributes", "capacity", "allowMultipleAllocations"];
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

/// Functions of [`FUNCTIONS`], and operators, whose result may be as large as all arguments together.
const GROWING: [&str; 14] = [
    operators::ADD,
    operators::CONDITIONAL,
    operators::INDEX,
    operators::OPT_INDEX,
    operators::OPT_SELECT,
    "lowerAscii",
    "or",
    "orValue",
    "semver",
    "string",
    "substring",
    "trim",
    "upperAscii",
    "value",
];

/// Evaluates expressions against devices.
#[derive(Debug)]
pub(crate) struct Evaluator {
    driver: String,
    jobs: Mutex<Option<Sender<Job>>>,
}

struct Job {
    expression: Arc<str>,
    devices: Vec<AttributeSet>,
    reply: oneshot::Sender<Result<Results, String>>,
}

/// The result of an expression for each device.
pub(crate) type Results = Vec<(AttributeSet, Match)>;

/// Why an expression has no result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum SelectorError {
    /// The expression is invalid: only its author can fix it.
    Wrong(String),
    /// There was no time or no thread for it, possibly because of other expressions: a retry may succeed.
    Unfinished(String),
}

impl Evaluator {
    /// Returns an evaluator for the devices of `driver`. The thread starts on first use.
    pub(crate) fn new(driver: &str) -> Self {
        Self {
            driver: driver.to_owned(),
            jobs: Mutex::new(None),
        }
    }

    /// Evaluates an expression against the first of at most [`CHUNK`] devices: as many as fit into a turn, and at least one if any.
    pub(crate) async fn evaluate(
        &self,
        expression: &Arc<str>,
        devices: Vec<AttributeSet>,
    ) -> Result<Results, SelectorError> {
        self.evaluate_within(DEADLINE, expression, devices).await
    }

    async fn evaluate_within(
        &self,
        limit: Duration,
        expression: &Arc<str>,
        devices: Vec<AttributeSet>,
    ) -> Result<Results, SelectorError> {
        let (reply, answer) = oneshot::channel();
        self.send(Job {
            expression: Arc::clone(expression),
            devices,
            reply,
        })
        .map_err(SelectorError::Unfinished)?;
        match tokio::time::timeout(limit, answer).await {
            Ok(Ok(evaluated)) => evaluated.map_err(SelectorError::Wrong),
            Ok(Err(_)) => {
                self.forget_thread();
                Err(SelectorError::Wrong("it cannot be evaluated".to_owned()))
            }
            Err(_) => {
                self.forget_thread();
                Err(SelectorError::Unfinished(format!(
                    "its evaluation takes longer than {limit:?}: simplify it; the evaluation is retried"
                )))
            }
        }
    }

    fn send(&self, job: Job) -> Result<(), String> {
        let mut jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        let job = match jobs.as_ref() {
            Some(sender) => match sender.send(job) {
                Ok(()) => return Ok(()),
                Err(unsent) => unsent.0,
            },
            None => job,
        };
        let (sender, receiver) = mpsc::channel();
        let driver = self.driver.clone();
        let thread = std::thread::Builder::new()
            .name("selectors".to_owned())
            .stack_size(STACK);
        // The thread ends when its sender is dropped, so it need not be joined.
        thread
            .spawn(move || run(&driver, &receiver))
            .map_err(|error| format!("no thread to evaluate it on: {error}"))?;
        let sent = sender.send(job).map_err(|_| "it cannot be evaluated".to_owned());
        *jobs = Some(sender);
        sent
    }

    fn forget_thread(&self) {
        *self.jobs.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

fn run(driver: &str, jobs: &Receiver<Job>) {
    let environment = CelEnvironment::new(driver);
    let mut programs: BTreeMap<Arc<str>, Result<Compiled, String>> = BTreeMap::new();
    let mut ages: VecDeque<Arc<str>> = VecDeque::new();
    while let Ok(job) = jobs.recv() {
        if !programs.contains_key(&job.expression) {
            ages.push_back(Arc::clone(&job.expression));
            if ages.len() > PROGRAMS_MAX
                && let Some(oldest) = ages.pop_front()
            {
                programs.remove(&oldest);
            }
        }
        let compile = || Compiled::new(&job.expression);
        let compiled = programs
            .entry(Arc::clone(&job.expression))
            .or_insert_with(compile);
        let evaluate = |compiled: &Compiled| {
            let begun = Instant::now();
            let mut evaluated = Results::new();
            for attributes in job.devices {
                // If the caller is gone, the remaining evaluations are useless.
                if job.reply.is_closed() || (!evaluated.is_empty() && begun.elapsed() >= TURN) {
                    break;
                }
                let result = compiled.evaluate(&environment, &attributes);
                evaluated.push((attributes, result));
            }
            evaluated
        };
        let evaluated = compiled.as_ref().map(evaluate).map_err(String::clone);
        let _ = job.reply.send(evaluated);
    }
}

/// The fair queue of all expressions.
#[derive(Debug, Default)]
pub(crate) struct FairQueue {
    /// Held for one turn. Waiters get it in the order of their requests, and request it again for their next turn.
    turn: AsyncMutex<()>,
    /// Per namespace and expression, the lock for which the waiters queue; its holder alone requests turns, so a hundred claims with one
    /// expression count as one. With an empty expression, the same for the turns of a namespace, so that its number of expressions does
    /// not matter to other namespaces.
    lines: KeyedLocks<ExpressionKey>,
}

/// A namespace and an expression.
type ExpressionKey = (Arc<str>, Arc<str>);

impl FairQueue {
    /// Waits for the right to request turns for an expression of a namespace.
    pub(crate) async fn line(&self, namespace: &Arc<str>, expression: &Arc<str>) -> OwnedMutexGuard<()> {
        let key = (Arc::clone(namespace), Arc::clone(expression));
        self.lines.lock(key).await
    }

    /// Waits for a turn of a namespace.
    pub(crate) async fn turn(&self, namespace: &Arc<str>) -> (OwnedMutexGuard<()>, MutexGuard<'_, ()>) {
        let line = self.line(namespace, &Arc::from("")).await;
        (line, self.turn.lock().await)
    }
}

/// The evaluation status of an expression.
#[derive(Debug)]
enum EvaluationStatus {
    Valid,
    Invalid(String),
    Unfinished {
        error: String,
        failures: u32,
        retry_at: Instant,
    },
}

/// The expressions of all parameter objects, those in use, and their evaluation status.
#[derive(Debug, Default)]
pub(crate) struct Expressions {
    statuses: BTreeMap<Arc<str>, EvaluationStatus>,
    /// The objects that contain an expression, by expression and namespace. One map, because most expressions are in one namespace only.
    uses: BTreeMap<(Arc<str>, Arc<str>), ExpressionUse>,
    /// How many expressions of each namespace are in use.
    used: BTreeMap<Arc<str>, usize>,
}

/// An expression in the objects of one namespace.
#[derive(Debug, Default)]
struct ExpressionUse {
    /// The number of objects that contain it.
    objects: usize,
    /// Whether it was requested.
    requested: bool,
}

/// The expression and the namespace of a selector.
fn key_of(selector: &CheckedSelector) -> (Arc<str>, Arc<str>) {
    let (expression, namespace) = (selector.expression(), selector.namespace());
    (Arc::clone(expression), Arc::clone(namespace))
}

impl Expressions {
    /// Adds the selectors of an object.
    pub(crate) fn add<'a>(&mut self, selectors: impl Iterator<Item = &'a CheckedSelector>) {
        for (expression, namespace) in selectors.map(key_of).collect::<BTreeSet<_>>() {
            let key = (self.shared(&expression), namespace);
            self.uses.entry(key).or_default().objects += 1;
        }
    }

    /// The text of an expression, shared with the stored one if there is one.
    fn shared(&self, expression: &Arc<str>) -> Arc<str> {
        let known = self.namespaces(expression).next();
        Arc::clone(known.map_or(expression, |((known, _), _)| known))
    }

    /// The namespaces that contain an expression.
    fn namespaces(
        &self,
        expression: &Arc<str>,
    ) -> impl Iterator<Item = (&(Arc<str>, Arc<str>), &ExpressionUse)> {
        let first = (Arc::clone(expression), Arc::from(""));
        let all = self.uses.range(first..);
        all.take_while(move |((other, _), _)| other == expression)
    }

    fn contains(&self, expression: &Arc<str>) -> bool {
        self.namespaces(expression).next().is_some()
    }

    /// The first namespace that contains an expression; empty if a class does.
    pub(crate) fn namespace(&self, expression: &Arc<str>) -> Arc<str> {
        let first = self.namespaces(expression).next();
        first.map_or_else(|| Arc::from(""), |((_, namespace), _)| Arc::clone(namespace))
    }

    /// Removes the selectors of an object. Returns the expressions that no object contains any more.
    pub(crate) fn remove<'a>(
        &mut self,
        selectors: impl Iterator<Item = &'a CheckedSelector>,
    ) -> Vec<Arc<str>> {
        let mut gone = Vec::new();
        for key in selectors.map(key_of).collect::<BTreeSet<_>>() {
            let Some(found) = self.uses.get_mut(&key) else {
                continue;
            };
            found.objects = found.objects.saturating_sub(1);
            if found.objects > 0 {
                continue;
            }
            if found.requested
                && let Some(used) = self.used.get_mut(&key.1)
            {
                *used = used.saturating_sub(1);
                if *used == 0 {
                    self.used.remove(&key.1);
                }
            }
            self.uses.remove(&key);
            if !self.contains(&key.0) {
                self.statuses.remove(&key.0);
                gone.push(key.0);
            }
        }
        gone
    }

    /// Marks a selector as in use, unless too many are.
    pub(crate) fn request(&mut self, selector: &CheckedSelector) -> Result<(), DriverError> {
        let namespace = selector.namespace();
        let in_namespace = self.used.get(namespace).copied().unwrap_or(0);
        // Operators write the classes, so the number of expressions in user objects must not make a class fail.
        let in_all: usize = self
            .used
            .iter()
            .filter(|(namespace, _)| !namespace.is_empty())
            .map(|(_, used)| used)
            .sum();
        let Some(found) = self.uses.get_mut(&key_of(selector)) else {
            return Err(DriverError::retry(
                "NotSynced",
                format!("{} has changed meanwhile", selector.object()),
            ));
        };
        if found.requested {
            return Ok(());
        }
        let is_full = in_namespace >= NAMESPACE_EXPRESSIONS_MAX;
        if !namespace.is_empty() && (is_full || in_all >= EXPRESSIONS_MAX) {
            let limit = if is_full {
                format!(
                    "the limit of {NAMESPACE_EXPRESSIONS_MAX} different expressions in use in namespace {namespace}"
                )
            } else {
                format!("the limit of {EXPRESSIONS_MAX} different expressions in use in all namespaces")
            };
            return Err(DriverError::retry(
                "TooManySelectors",
                format!(
                    "{}: {} is beyond {limit}; write the same expression in several objects, or delete DeviceClaimParameters that no claim uses",
                    selector.object(),
                    selector.label()
                ),
            ));
        }
        found.requested = true;
        *self.used.entry(Arc::clone(namespace)).or_default() += 1;
        Ok(())
    }

    /// Whether an expression is known to be valid, or the error that keeps it from being evaluated now.
    pub(crate) fn check(&self, expression: &Arc<str>, now: Instant) -> Result<bool, SelectorError> {
        if !self.contains(expression) {
            return Err(SelectorError::Unfinished(
                "no object contains it any more".to_owned(),
            ));
        }
        match self.statuses.get(expression) {
            Some(EvaluationStatus::Invalid(error)) => Err(SelectorError::Wrong(error.clone())),
            Some(EvaluationStatus::Unfinished { error, retry_at, .. }) if *retry_at > now => {
                Err(SelectorError::Unfinished(error.clone()))
            }
            Some(EvaluationStatus::Unfinished { .. }) | None => Ok(false),
            Some(EvaluationStatus::Valid) => Ok(true),
        }
    }

    pub(crate) fn is_valid(&self, expression: &Arc<str>) -> bool {
        matches!(self.statuses.get(expression), Some(EvaluationStatus::Valid))
    }

    /// When an expression that was not evaluated in time is due for a retry.
    pub(crate) fn retry_at(&self, expression: &Arc<str>) -> Option<Instant> {
        match self.statuses.get(expression) {
            Some(EvaluationStatus::Unfinished { retry_at, .. }) => Some(*retry_at),
            _ => None,
        }
    }

    /// Records the outcome of an evaluation. Returns its results; `None` if no object contains the expression any more.
    pub(crate) fn evaluated(
        &mut self,
        expression: &Arc<str>,
        evaluated: Result<Results, SelectorError>,
        now: Instant,
    ) -> Option<Results> {
        if !self.contains(expression) {
            return None;
        }
        let (results, status) = match evaluated {
            Ok(results) => (results, EvaluationStatus::Valid),
            Err(SelectorError::Wrong(error)) => (Vec::new(), EvaluationStatus::Invalid(error)),
            Err(SelectorError::Unfinished(error)) => {
                let failures = match self.statuses.get(expression) {
                    Some(EvaluationStatus::Unfinished { failures, .. }) => failures.saturating_add(1),
                    _ => 0,
                };
                let delay = UNFINISHED_RETRY_INTERVAL.saturating_mul(1 << failures.min(16));
                let retry_at = now + delay.min(MAX_UNFINISHED_RETRY_INTERVAL);
                let status = EvaluationStatus::Unfinished {
                    error,
                    failures,
                    retry_at,
                };
                (Vec::new(), status)
            }
        };
        self.statuses.insert(Arc::clone(expression), status);
        Some(results)
    }
}

/// The environment of all evaluations.
#[allow(missing_debug_implementations, reason = "the context of CEL has none")]
pub struct CelEnvironment {
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

impl CelEnvironment {
    /// Returns the environment for the devices of one driver: attribute names without a domain belong to `driver`.
    pub fn new(driver: &str) -> Self {
        let mut context = Context::default().with_all();
        // The function of cel accepts patterns of megabytes, with which a search takes tens of seconds.
        let matches = |This(text): This<Arc<String>>, pattern: Arc<String>| {
            regular_expression(&pattern, text.len())
                .map(|pattern| pattern.is_match(&text))
                .map_err(|error| ExecutionError::function_error("matches", error))
        };
        context.add_function("matches", matches);
        // The function of cel panics on empty bytes.
        let contains = |This(value): This<Value>, part: Value| match &part {
            Value::Bytes(bytes) if bytes.is_empty() => Ok(Value::Bool(matches!(value, Value::Bytes(_)))),
            _ => functions::contains(This(value), part),
        };
        context.add_function("contains", contains);
        Self {
            context,
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
    /// Compiles an expression, or returns its error. Needs a stack of some megabytes ([`STACK`]), more than the main
    /// thread and a runtime's threads have.
    pub fn new(expression: &str) -> Result<Self, String> {
        Self::with_fields(expression, &FIELDS)
    }

    /// Compiles an expression of `resource.k8s.io/v1`. Needs the same stack.
    pub fn structured(expression: &str) -> Result<Self, String> {
        Self::with_fields(expression, &STRUCTURED_FIELDS)
    }

    fn with_fields(expression: &str, fields: &[&str]) -> Result<Self, String> {
        check_text(expression)?;
        // Kubernetes has optional values since 1.28.
        let parser = Parser::default().enable_optional_syntax(true);
        let mut expression = parser.parse(expression).map_err(|errors| {
            // There may be an error for each character, and each error cites the whole line.
            let first = errors.errors.iter().take(PARSE_ERRORS_MAX);
            shortened(&first.map(ToString::to_string).collect::<Vec<_>>().join("\n"))
        })?;
        let keys = ExpressionChecker::of(&expression, fields)?.keys;
        index_optionally(&mut expression);
        Ok(Self { expression, keys })
    }

    /// Evaluates the expression against a device's attributes. Needs the same stack.
    pub fn evaluate(&self, environment: &CelEnvironment, attributes: &AttributeSet) -> Match {
        let values = attributes
            .iter()
            .filter_map(|(name, value)| Some((&**name, environment.value(value)?)));
        let result = self.execute(
            environment,
            Input {
                driver: &environment.driver,
                attributes: values.collect(),
                capacity: Vec::new(),
                allow_multiple_allocations: None,
            },
        );
        match_of(&result)
    }

    /// Evaluates the expression against a device of a ResourceSlice of `driver`. An error says why only the scheduler can. Needs the same
    /// stack.
    pub fn evaluate_device(
        &self,
        environment: &CelEnvironment,
        driver: &str,
        device: &Device,
    ) -> Result<Match, Arc<str>> {
        let attributes = device.attributes.iter().flatten();
        let capacity = device.capacity.iter().flatten();
        let result = self.execute(
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
        );
        match result {
            // The syntax and the limits of regular expressions are ours.
            Err(ExecutionError::FunctionError { function, message }) if function == "matches" => {
                Err(shortened(&message).into())
            }
            result => Ok(match_of(&result)),
        }
    }

    fn execute(&self, environment: &CelEnvironment, input: Input<'_>) -> Result<Value, ExecutionError> {
        let mut context = environment.context.new_inner_scope();
        context.add_variable_from_value("device", CelEnvironment::device(input, &self.keys));
        Value::resolve(&self.expression, &context)
    }
}

fn match_of(result: &Result<Value, ExecutionError>) -> Match {
    match result {
        Ok(Value::Bool(true)) => Match::Yes,
        Ok(Value::Bool(false)) => Match::No,
        Ok(_) => Match::Failed("the result is neither true nor false".into()),
        Err(error) => Match::Failed(shortened(&error_text(error)).into()),
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
/// so the same error would be reported again and again.
fn error_text(error: &ExecutionError) -> String {
    match error {
        ExecutionError::UnsupportedTargetType { target } => {
            format!("a function does not accept {}", value_text(target))
        }
        ExecutionError::NotSupportedAsMethod { method, target } => {
            format!("there is no function {method:?} of {}", value_text(target))
        }
        ExecutionError::UnsupportedKeyType(value) => {
            format!("{} cannot be a key of a map", value_text(value))
        }
        ExecutionError::ValuesNotComparable(left, right) => {
            format!("{} cannot be compared to {}", value_text(left), value_text(right))
        }
        ExecutionError::UnsupportedUnaryOperator(operator, value) => {
            format!("operator {operator:?} does not accept {}", value_text(value))
        }
        ExecutionError::UnsupportedBinaryOperator(operator, left, right) => {
            format!(
                "operator {operator:?} does not accept {} and {}",
                value_text(left),
                value_text(right)
            )
        }
        ExecutionError::UnsupportedMapIndex(value) => format!("a map has no {}", value_text(value)),
        ExecutionError::UnsupportedListIndex(value) => format!("a list has no {}", value_text(value)),
        ExecutionError::UnsupportedIndex(index, value) => {
            format!("there is no {} in {}", value_text(index), value_text(value))
        }
        ExecutionError::FunctionError { function, message } if message.contains("Map(") => {
            format!("function {function:?} does not accept a map")
        }
        other => other.to_string(),
    }
}

fn value_text(value: &Value) -> String {
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

/// Rejects a text that must not be parsed.
fn check_text(expression: &str) -> Result<(), String> {
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
                "it has {number} {name}; at most {most} are allowed{SHORTER}"
            ));
        }
    }
    check_tokens(expression)
}

/// Rejects a negation that is not followed by a value. The parser visits the operand of two negations twice, which takes exponential time and
/// memory if pairs are nested, and negates it once. Its error recovery drops wrong characters and tokens, also between two negations.
fn check_tokens(expression: &str) -> Result<(), String> {
    let pattern = TOKEN.as_ref().map_err(ToString::to_string)?;
    let (mut left, mut before, mut repeated) = (expression, "", 0);
    while !left.is_empty() {
        let Some(found) = pattern.find(left) else {
            return Err(format!(
                "{} cannot be read: a string has no end or a wrong escape, or a character is not allowed",
                cited(left)
            ));
        };
        let (token, rest) = left.split_at(found.len());
        left = rest;
        if token.starts_with("//") || token.trim_start().is_empty() {
            continue;
        }
        let is_operand = token.starts_with(|first: char| {
            first.is_ascii_alphanumeric() || matches!(first, '_' | '.' | '(' | '[' | '{' | '"' | '\'')
        });
        let is_repeated = before == "-" && token == "-";
        repeated += usize::from(is_repeated);
        if matches!(before, "!" | "-") && !is_operand && !(is_repeated && repeated <= REPEATED_MAX) {
            return Err(format!(
                "{before:?} is followed by {} instead of a value",
                cited(token)
            ));
        }
        before = token;
    }
    Ok(())
}

/// Compiles a regular expression, unless it is too large for a text of this length.
fn regular_expression(pattern: &str, length: usize) -> Result<Regex, String> {
    let limit = PATTERN_MAX * SHORT_TEXT / length.max(SHORT_TEXT);
    let compiled = if pattern.len() > EXPRESSION_MAX {
        Err(regex::Error::CompiledTooBig(limit))
    } else {
        let mut builder = RegexBuilder::new(pattern);
        builder.size_limit(limit).dfa_size_limit(limit).build()
    };
    compiled.map_err(|error| match error {
        regex::Error::CompiledTooBig(_) => format!(
            "the regular expression {} is too large when compiled: use shorter repetitions, and [0-9A-Za-z_] instead of \\w",
            cited(pattern)
        ),
        error => {
            let error = error.to_string();
            let reason = error.lines().next_back().unwrap_or_default();
            let reason = reason.trim_start_matches("error: ");
            format!("the regular expression {} is invalid: {reason}", cited(pattern))
        }
    })
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

/// Upper bounds of an evaluation and its value. The size of a value is its number of parts at all depths, where [`PART`] bytes of text count
/// as one.
#[derive(Clone, Copy, Debug, Default)]
struct Cost {
    steps: usize,
    size: usize,
    /// Size of the largest element.
    element: usize,
}

impl Cost {
    fn and(self, other: Self) -> Self {
        Self {
            steps: self.steps.saturating_add(other.steps),
            size: self.size.saturating_add(other.size),
            element: self.element.max(other.element),
        }
    }

    fn with_steps(mut self, steps: usize) -> Self {
        self.steps = self.steps.saturating_add(steps);
        self
    }
}

/// Checks a parsed expression.
#[derive(Debug)]
struct ExpressionChecker<'f> {
    fields: &'f [&'f str],
    /// The string keys used on maps: each is added as an empty domain, so that a domain without attributes is an empty map.
    keys: Vec<String>,
    variables: BTreeMap<String, Cost>,
    comprehension: bool,
}

impl<'f> ExpressionChecker<'f> {
    /// Rejects an expression that must not be evaluated. `fields` are those of `device`.
    fn of(expression: &IdedExpr, fields: &'f [&'f str]) -> Result<Self, String> {
        let mut checker = Self {
            fields,
            keys: Vec::new(),
            variables: BTreeMap::from([("device".to_owned(), DEVICE)]),
            comprehension: false,
        };
        let Cost { steps, .. } = checker.cost(expression)?;
        if steps > STEPS_MAX {
            return Err(format!(
                "one evaluation takes up to {steps} steps; at most {STEPS_MAX} are allowed{SIMPLER}"
            ));
        }
        Ok(checker)
    }

    fn all<'a>(&mut self, expressions: impl IntoIterator<Item = &'a IdedExpr>) -> Result<Cost, String> {
        expressions
            .into_iter()
            .try_fold(Cost::default(), |sum, expression| {
                Ok(sum.and(self.cost(expression)?))
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

    fn cost(&mut self, expression: &IdedExpr) -> Result<Cost, String> {
        let cost = match &expression.expr {
            // Its evaluation would panic.
            Expr::Unspecified => return Err("it is incomplete".to_owned()),
            Expr::Literal(literal) => {
                let text = match literal {
                    LiteralValue::String(text) => text.inner().len(),
                    LiteralValue::Bytes(bytes) => bytes.inner().len(),
                    _ => 0,
                };
                Cost {
                    size: 1 + text / PART,
                    ..Cost::default()
                }
            }
            Expr::Ident(name) => {
                let variable = self.variables.get(name).copied();
                variable.ok_or_else(|| format!("there is no variable {}, only device", cited(name)))?
            }
            Expr::Select(select) => {
                self.check_field(&select.operand, &select.field)?;
                self.cost(&select.operand)?
            }
            Expr::Call(call) => self.call(call)?,
            Expr::List(list) => self.made_of(&list.elements)?,
            Expr::Map(map) => {
                let mut parts = Vec::new();
                for entry in &map.entries {
                    let EntryExpr::MapEntry(entry) = &entry.expr else {
                        return Err("it constructs an object, which selectors do not support".to_owned());
                    };
                    parts.extend([&entry.key, &entry.value]);
                }
                self.made_of(parts)?
            }
            Expr::Struct(made) => {
                return Err(format!(
                    "it constructs an object of type {}, which selectors do not support",
                    cited(&made.type_name)
                ));
            }
            Expr::Comprehension(comprehension) => self.comprehension(comprehension)?,
        };
        Ok(cost.with_steps(1))
    }

    fn call(&mut self, call: &CallExpr) -> Result<Cost, String> {
        let name = call.func_name.as_str();
        let operator = name.starts_with(['_', '@', '!', '-']);
        if !operator && !FUNCTIONS.contains(&name) {
            return Err(format!("there is no function {} in selectors", cited(name)));
        }
        if let [operand, key] = call.args.as_slice()
            && let Expr::Literal(LiteralValue::String(key)) = &key.expr
        {
            match name {
                // A longer name cannot be a domain.
                "_[_]" | "_[?_]" if key.inner().len() <= ATTRIBUTE_NAME_MAX => {
                    self.keys.push(key.inner().to_owned());
                }
                "_?._" => self.check_field(operand, key.inner())?,
                _ => {}
            }
        }
        let (mut cost, mut last) = (Cost::default(), Cost::default());
        for part in call.target.as_deref().into_iter().chain(&call.args) {
            last = self.cost(part)?;
            cost = cost.and(last);
        }
        if !operator && call.target.is_none() {
            // Some functions evaluate their first argument twice if it is not written before the dot.
            cost = cost.with_steps(cost.steps);
        }
        if name == "matches" {
            if let Some(Expr::Literal(LiteralValue::String(pattern))) =
                call.args.last().map(|pattern| &pattern.expr)
            {
                regular_expression(pattern.inner(), 0)?;
            }
            cost = cost.with_steps(PATTERN_PART_STEPS.saturating_mul(last.size));
            cost = cost.with_steps(PATTERN_STEPS);
        }
        cost = cost.with_steps(cost.size / READ_PER_STEP);
        if !GROWING.contains(&name) {
            (cost.size, cost.element) = (1, 0);
        }
        Ok(cost)
    }

    /// The cost of a list or map of these parts.
    fn made_of<'a>(&mut self, parts: impl IntoIterator<Item = &'a IdedExpr>) -> Result<Cost, String> {
        let mut made = Cost {
            size: 1,
            ..Cost::default()
        };
        for part in parts {
            let part = self.cost(part)?;
            made = made.and(Cost {
                element: part.size,
                ..part
            });
        }
        Ok(made.with_steps(made.size / MADE_PER_STEP))
    }

    fn comprehension(&mut self, comprehension: &ComprehensionExpr) -> Result<Cost, String> {
        if std::mem::replace(&mut self.comprehension, true) {
            return Err(
                "it has more than one of all, exists, exists_one, filter and map: use a separate selector \
                 for each; a device must match all selectors"
                    .to_owned(),
            );
        }
        let range = self.cost(&comprehension.iter_range)?;
        let start = self.cost(&comprehension.accu_init)?;
        let element = Cost {
            steps: 0,
            size: range.element,
            element: range.element,
        };
        self.variables
            .insert(comprehension.accu_var.clone(), Cost::default());
        for name in std::iter::once(&comprehension.iter_var).chain(&comprehension.iter_var2) {
            // A variable may have the name of the device.
            let variable = self.variables.entry(name.clone()).or_default();
            *variable = variable.and(element);
        }
        let step = self.all([
            &comprehension.loop_cond,
            &comprehension.loop_step,
            &comprehension.result,
        ])?;
        let elements = range.size;
        let mut cost = Cost {
            steps: elements.saturating_mul(step.steps),
            size: 1,
            element: 0,
        };
        if matches!(comprehension.accu_init.expr, Expr::List(_)) {
            // Each iteration copies the list that it extends.
            cost.size = elements.saturating_mul(step.size);
            cost.element = step.size;
            cost = cost.with_steps(elements.saturating_mul(cost.size) / READ_PER_STEP);
        }
        Ok(cost.with_steps(range.steps).with_steps(start.steps))
    }
}

/// Compiled selectors of structured mode. [`with_selectors`] provides the stack that they need.
struct DeviceSelectors {
    environment: CelEnvironment,
    programs: BTreeMap<String, Result<Compiled, Arc<str>>>,
}

impl DeviceSelectors {
    /// Evaluates an expression against a device of a driver. The API server has accepted the expression, so an error of our compiler is a
    /// limit of ours.
    fn evaluate(&mut self, expression: &str, driver: &str, device: &Device) -> Result<Match, Arc<str>> {
        if !self.programs.contains_key(expression) {
            // The advice is for classic mode.
            let compiled = Compiled::structured(expression).map_err(|error| {
                let mut advice = [SHORTER, SIMPLER].into_iter();
                let text = advice.find_map(|advice| error.strip_suffix(advice));
                Arc::from(text.unwrap_or(&error))
            });
            self.programs.insert(expression.to_owned(), compiled);
        }
        match self.programs.get(expression) {
            Some(Ok(compiled)) => compiled.evaluate_device(&self.environment, driver, device),
            Some(Err(error)) => Err(Arc::clone(error)),
            None => Err("it was not compiled".into()),
        }
    }
}

/// Runs `work`, which evaluates selectors, on a thread with a stack of [`STACK`] bytes, and waits for it.
pub fn with_selectors<T: Send>(work: impl FnOnce(&mut Evaluate<'_>) -> T + Send) -> Result<T, String> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new()
            .name("selectors".to_owned())
            .stack_size(STACK);
        let run = || {
            let mut selectors = DeviceSelectors {
                environment: CelEnvironment::new(""),
                programs: BTreeMap::new(),
            };
            work(&mut |expression, driver, device| selectors.evaluate(expression, driver, device))
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
mod tests;
