//! Quantities of Kubernetes, exact to a billionth.

use std::fmt;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity as Text;

/// Billionths in one.
const ONE: i128 = 1_000_000_000;
/// Number of characters of a quantity, at most. The API server stores a canonical form, which has about 25.
const TEXT_MAX: usize = 64;

/// An amount, in billionths: Kubernetes rounds up to that, and its largest amount of 2^63-1 fits by far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Quantity(i128);

impl Quantity {
    /// Reads a quantity of an object as `resource.ParseQuantity` does, for instance `12`, `1.5`, `500m`, `40Gi` or `1e3`.
    pub fn read(text: &Text) -> Result<Self, String> {
        parse(&text.0).ok_or_else(|| {
            let shown: String = text.0.chars().take(TEXT_MAX).collect();
            format!("{shown:?} is not a Kubernetes quantity")
        })
    }

    /// The sum; the largest quantity if it is larger.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }

    /// Whether the quantity is below zero.
    pub fn is_negative(self) -> bool {
        self.0 < 0
    }

    /// The smallest amount of `min` plus a multiple of `step` that is not less than this one; `None` for a step of zero.
    pub(super) fn rounded_up(self, min: Self, step: Self) -> Option<Self> {
        let above = self.0.checked_sub(min.0)?;
        let rest = above.checked_rem_euclid(step.0)?;
        let missing = if rest == 0 { 0 } else { step.0.checked_sub(rest)? };
        self.0.checked_add(missing).map(Self)
    }

    /// The quantity as a text of an object, with a binary suffix if `like` has one.
    pub(super) fn text_like(self, like: &Text) -> Text {
        if like.0.ends_with('i') {
            let binary = [
                (60, "Ei"),
                (50, "Pi"),
                (40, "Ti"),
                (30, "Gi"),
                (20, "Mi"),
                (10, "Ki"),
            ];
            for (shift, suffix) in binary {
                let unit = ONE << shift;
                if self.0 != 0 && self.0 % unit == 0 {
                    return Text(format!("{}{suffix}", self.0 / unit));
                }
            }
        }
        Text(self.to_string())
    }
}

impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (unit, suffix) in [(ONE, ""), (ONE / 1_000, "m"), (ONE / 1_000_000, "u")] {
            if self.0 % unit == 0 {
                return write!(f, "{}{suffix}", self.0 / unit);
            }
        }
        write!(f, "{}n", self.0)
    }
}

fn parse(text: &str) -> Option<Quantity> {
    if text.len() > TEXT_MAX {
        return None;
    }
    let (negative, unsigned) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    let end = unsigned
        .find(|character: char| !character.is_ascii_digit() && character != '.')
        .unwrap_or(unsigned.len());
    let (number, suffix) = unsigned.split_at_checked(end)?;
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let digits = format!("{whole}{fraction}");
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let mantissa: i128 = digits.parse().ok()?;
    let places = u32::try_from(fraction.len()).ok()?;
    let (multiplier, exponent) = scale(suffix)?;
    // mantissa * multiplier * 10^(exponent - places), in billionths
    let exponent = exponent
        .checked_add(9)?
        .checked_sub(i32::try_from(places).ok()?)?;
    let product = mantissa.checked_mul(multiplier)?;
    let amount = if product == 0 {
        0
    } else if let Ok(exponent) = u32::try_from(exponent) {
        product.checked_mul(10_i128.checked_pow(exponent)?)?
    } else {
        match 10_i128.checked_pow(exponent.unsigned_abs()) {
            Some(divisor) => product.checked_add(divisor - 1)? / divisor,
            None => 1,
        }
    };
    Some(Quantity(if negative { -amount } else { amount }))
}

/// The factor of a suffix, as a multiplier and a power of ten.
fn scale(suffix: &str) -> Option<(i128, i32)> {
    let decimal = |exponent| Some((1, exponent));
    let binary = |exponent: u32| Some((1_i128 << exponent, 0));
    match suffix {
        "" => decimal(0),
        "n" => decimal(-9),
        "u" => decimal(-6),
        "m" => decimal(-3),
        "k" => decimal(3),
        "M" => decimal(6),
        "G" => decimal(9),
        "T" => decimal(12),
        "P" => decimal(15),
        "E" => decimal(18),
        "Ki" => binary(10),
        "Mi" => binary(20),
        "Gi" => binary(30),
        "Ti" => binary(40),
        "Pi" => binary(50),
        "Ei" => binary(60),
        other => decimal(other.strip_prefix(['e', 'E'])?.parse().ok()?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quantity(text: &str) -> Quantity {
        Quantity::read(&Text(text.to_owned())).unwrap()
    }

    #[test]
    fn quantities_are_parsed_as_by_kubernetes() {
        for (text, shown) in [
            ("0", "0"),
            ("12", "12"),
            ("-3", "-3"),
            ("+3", "3"),
            ("1.5", "1500m"),
            (".5", "500m"),
            ("1.", "1"),
            ("500m", "500m"),
            ("1500u", "1500u"),
            ("1n", "1n"),
            ("0.1n", "1n"),
            ("2k", "2000"),
            ("1Ki", "1024"),
            ("1.5Gi", "1610612736"),
            ("1E", "1000000000000000000"),
            ("1e3", "1000"),
            ("1E3", "1000"),
            ("1e-3", "1m"),
            ("8Ei", "9223372036854775808"),
        ] {
            assert_eq!(quantity(text).to_string(), shown, "{text}");
        }
        let endless = "9".repeat(65);
        for wrong in [
            "", "-", ".", "1..2", "1.2.3", "Gi", "1gi", "1 ", "1e", "1e99", &endless,
        ] {
            assert!(Quantity::read(&Text(wrong.to_owned())).is_err(), "{wrong}");
        }
    }

    #[test]
    fn amounts_are_rounded_up_to_the_next_step() {
        let rounded = |amount, min, step| quantity(amount).rounded_up(quantity(min), quantity(step));
        assert_eq!(rounded("5", "1", "2"), Some(quantity("5")));
        assert_eq!(rounded("6", "1", "2"), Some(quantity("7")));
        assert_eq!(rounded("1.2", "1", "0.5"), Some(quantity("1.5")));
        assert_eq!(rounded("6", "1", "0"), None);
    }

    #[test]
    fn a_rounded_amount_keeps_its_sort_of_suffix() {
        let text = |amount, like: &str| quantity(amount).text_like(&Text(like.to_owned())).0;
        assert_eq!(text("2147483648", "1500Mi"), "2Gi");
        assert_eq!(text("1536Mi", "1Gi"), "1536Mi");
        assert_eq!(text("1500", "1Ki"), "1500");
        assert_eq!(text("0", "1Ki"), "0");
        assert_eq!(text("2Gi", "1500000000"), "2147483648");
    }
}
