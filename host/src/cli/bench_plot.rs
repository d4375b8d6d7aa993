//! Pictures of profiles: where each stage stands against the limits of the device, and one step in time.
//!
//! Decoding does few operations for every byte it reads, so the roofs are those of memory: its bandwidth, and for
//! small launches the time that the shortest one takes.

use std::error::Error;
use std::path::Path;

use plotters::coord::Shift;
use plotters::prelude::*;

use super::bench_profile::{Part, Profile};
use super::error::CliError;

/// Of one profile, in pixels.
const SIZE: (u32, u32) = (1400, 480);
/// Width of the roofline's part.
const ROOFLINE_WIDTH: u32 = 620;
/// Lines that the timeline of a step is broken into: a step has hundreds of launches.
const TIMELINE_ROWS: usize = 8;

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn = Result<(), Box<dyn Error>>;

/// Writes a picture of the profiles, one below the other.
pub(super) fn draw(path: &Path, profiles: &[Profile]) -> Result<(), CliError> {
    let mut svg = String::new();
    let failed = |source| CliError::File { path: path.to_owned(), source };
    draw_all(&mut svg, profiles).map_err(|e| failed(std::io::Error::other(e.to_string())))?;
    std::fs::write(path, svg).map_err(failed)
}

fn draw_all(svg: &mut String, profiles: &[Profile]) -> Drawn {
    let height = SIZE.1.saturating_mul(u32::try_from(profiles.len())?);
    let root = SVGBackend::with_string(svg, (SIZE.0, height)).into_drawing_area();
    root.fill(&WHITE)?;
    for (profile, area) in profiles.iter().zip(root.split_evenly((profiles.len(), 1))) {
        let (left, right) = area.split_horizontally(ROOFLINE_WIDTH);
        draw_roofline(&left, profile)?;
        draw_timeline(&right, profile)?;
    }
    Ok(root.present()?)
}

fn color(profile: &Profile, stage: &str) -> RGBColor {
    let index = profile.stages.iter().position(|part| part.name == stage).unwrap_or(0);
    let (r, g, b) = Palette99::pick(index).to_rgba().rgb();
    RGBColor(r, g, b)
}

/// Bytes a launch, and GB/s, of a stage.
fn point(part: &Part) -> (f64, f64) {
    (part.moved_bytes / part.launches, part.gb_per_s)
}

fn draw_roofline(area: &Area<'_>, profile: &Profile) -> Drawn {
    let stages: Vec<&Part> = profile.stages.iter().filter(|part| part.moved_bytes > 0.0 && part.us > 0.0).collect();
    let bandwidth = profile.read_gb_per_s.filter(|x| *x > 0.0);
    let xs = || stages.iter().map(|part| point(part).0);
    let ys = || stages.iter().map(|part| point(part).1).chain(bandwidth);
    let (x_min, x_max) = (xs().fold(f64::INFINITY, f64::min) / 3.0, xs().fold(0.0, f64::max) * 3.0);
    let (y_min, y_max) = (ys().fold(f64::INFINITY, f64::min) / 3.0, ys().fold(0.0, f64::max) * 3.0);
    if stages.is_empty() || !(x_min > 0.0 && y_min > 0.0) {
        return Ok(());
    }
    let mut chart = ChartBuilder::on(area)
        .caption(&profile.name, ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(64)
        .build_cartesian_2d((x_min..x_max).log_scale(), (y_min..y_max).log_scale())?;
    chart.configure_mesh().x_desc("bytes moved by a launch").y_desc("GB/s").light_line_style(WHITE).draw()?;
    if let Some(bandwidth) = bandwidth {
        chart.draw_series(LineSeries::new([(x_min, bandwidth), (x_max, bandwidth)], &RED))?;
        let label = format!("memory reads {bandwidth:.0} GB/s");
        chart.draw_series([Text::new(
            label,
            (x_min * 1.1, bandwidth * 1.25),
            ("sans-serif", 13).into_font().color(&RED),
        )])?;
    }
    let shortest_us = profile.launches.iter().map(|launch| launch.us).fold(f64::INFINITY, f64::min);
    if shortest_us.is_finite() && shortest_us > 0.0 {
        let speed = |bytes: f64| bytes / shortest_us / 1e3;
        // Only the part within the picture.
        let ends = [y_min, bandwidth.unwrap_or(y_max)].map(|y| (y * shortest_us * 1e3).clamp(x_min, x_max));
        chart.draw_series(LineSeries::new(ends.map(|x| (x, speed(x))), &BLUE))?;
    }
    chart.draw_series(stages.iter().map(|part| Circle::new(point(part), 5, color(profile, &part.name).filled())))?;
    chart.draw_series(stages.iter().map(|part| {
        let (x, y) = point(part);
        let label = format!("{} ({:.0} us)", part.name, part.us);
        Text::new(label, (x * 1.1, y), ("sans-serif", 13))
    }))?;
    Ok(())
}

fn draw_timeline(area: &Area<'_>, profile: &Profile) -> Drawn {
    let row_us = profile.launches.iter().map(|launch| launch.us).sum::<f64>() / TIMELINE_ROWS as f64;
    if row_us <= 0.0 {
        return Ok(());
    }
    let caption = format!("one step: {:.0} us of kernels, one after the other", profile.kernels_us);
    let mut chart = ChartBuilder::on(area)
        .caption(caption, ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(40)
        .build_cartesian_2d(0.0..row_us, 0.0..TIMELINE_ROWS as f64 + 1.5)?;
    chart.configure_mesh().disable_y_mesh().disable_y_axis().x_desc("us; each line continues the one above").draw()?;
    let mut start_us = 0.0;
    for launch in &profile.launches {
        let (mut from, end) = (start_us, start_us + launch.us);
        start_us = end;
        // A launch may go over the end of a line.
        while from < end {
            let row = ((from / row_us) as usize).min(TIMELINE_ROWS - 1);
            let to = if row + 1 < TIMELINE_ROWS { end.min((row + 1) as f64 * row_us) } else { end };
            let (base, top) = (row as f64 * row_us, (TIMELINE_ROWS - row) as f64);
            let bar = [(from - base, top - 0.85), ((to - base).min(row_us), top - 0.1)];
            chart.draw_series([Rectangle::new(bar, color(profile, launch.stage).filled())])?;
            if to <= from {
                break;
            }
            from = to;
        }
    }
    let width = row_us / profile.stages.len().max(1) as f64;
    let top = TIMELINE_ROWS as f64;
    for (i, part) in profile.stages.iter().enumerate() {
        let x = i as f64 * width;
        let bar = [(x, top + 0.55), (x + width * 0.12, top + 0.95)];
        chart.draw_series([Rectangle::new(bar, color(profile, &part.name).filled())])?;
        chart.draw_series([Text::new(part.name.clone(), (x + width * 0.16, top + 0.95), ("sans-serif", 13))])?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::{Launched, Measured, Section};

    #[test]
    fn a_picture_has_every_stage_and_a_bar_for_every_launch() {
        let launch = |i: u32| {
            let (section, kernel) = match i {
                0 => (Section::Embedding, "embedding"),
                i if i.is_multiple_of(2) => (Section::Moe, "rms_norm"),
                _ => (Section::Head, "matvec"),
            };
            Launched { section, kernel, us: 1.0 + f64::from(i), moved_bytes: 1 << (10 + i) }
        };
        let measured = Measured { launches: (0..12).map(launch).collect(), read_gb_per_s: Some(100.0) };
        let profile = Profile::new("a step".to_owned(), &measured, 1, 100.0);
        let mut svg = String::new();
        draw_all(&mut svg, &[profile]).expect("drawn");
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"), "{svg}");
        for text in ["a step", "norm", "head", "memory reads 100 GB/s"] {
            assert!(svg.contains(text), "{text} is not in {svg}");
        }
        assert!(svg.matches("<rect").count() >= 12, "{svg}");
        // Without anything to show there is still a picture.
        let empty = Profile::new("nothing".to_owned(), &Measured::default(), 1, 1.0);
        draw_all(&mut String::new(), &[empty]).expect("drawn");
    }
}
